#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "comm/gloo/gloo_transport.h"
#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/runfiles.h"
#include "tools/bench/parts.h"
#include "tools/bench/training/peer.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

// A program that is started several times. Empty where it was not built.
std::string program(const std::string& name) {
  return engine::find_runfile("/proc/self/exe", "tools/bench/processes/" + name);
}

// Removed at the end.
class Folder {
 public:
  Folder() {
    std::string name = fs::temp_directory_path() / "tessera_bench_XXXXXX";
    engine::require<engine::IoError>(mkdtemp(name.data()) != nullptr,
                                     "[bench] expected to make a folder like {}, got none", name);
    path_ = name;
  }
  ~Folder() {
    std::error_code unused;
    fs::remove_all(path_, unused);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// What process 0 of `num` prints, which mpirun starts.
std::string under_mpirun(int num, const Words& command) {
  Words words = {"env",
                 "OMPI_ALLOW_RUN_AS_ROOT=1",
                 "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                 "mpirun",
                 "--oversubscribe",
                 "--bind-to",
                 "none",
                 "--quiet",
                 "-n",
                 std::to_string(num)};
  words.insert(words.end(), command.begin(), command.end());
  return run_program(words);
}

// What process 0 of `num` prints, which are started one by one.
template <class F>
std::string on_loopback(int num, const F& command_of) {
  std::vector<std::future<std::string>> outputs;
  for (int p = 0; p < num; ++p) {
    outputs.push_back(
        std::async(std::launch::async, [command = command_of(p)] { return run_program(command); }));
  }
  for (const auto& output : outputs) output.wait();
  return outputs[0].get();
}

std::string ours_over_mpi(int num, const Words& options) {
  Words words = {program("tessera_process"), "--parallel.launcher=openmpi",
                 "--parallel.transport=mpi"};
  words.insert(words.end(), options.begin(), options.end());
  return under_mpirun(num, words);
}

std::string ours_over_gloo(int num, const Words& options) {
  const std::string port = std::to_string(20000 + getpid() % 10000);
  const fs::path plugin = comm::find_gloo_plugin("/proc/self/exe");  // the bench's, not its own
  return on_loopback(num, [&](int process) {
    Words words = {"env", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port,
                   "LD_LIBRARY_PATH=" + plugin.parent_path().string()};
    for (const char* name : {"RANK", "LOCAL_RANK"}) {
      words.push_back(fmt::format("{}={}", name, process));
    }
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) {
      words.push_back(fmt::format("{}={}", name, num));
    }
    words.insert(words.end(),
                 {program("tessera_process"), "--parallel.launcher=env",
                  "--parallel.transport=gloo", "--parallel.address=tcp:127.0.0.1:" + port + "+15"});
    words.insert(words.end(), options.begin(), options.end());
    return words;
  });
}

std::string gloos_own(int num, const std::string& samples) {
  const Folder folder;
  return on_loopback(num, [&](int process) {
    return Words{program("gloo_process"), samples, folder.path(), std::to_string(process),
                 std::to_string(num)};
  });
}

// Each line that is a record.
std::vector<nlohmann::json> records_of(const std::string& output) {
  std::vector<nlohmann::json> records;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("{")) records.push_back(engine::parse_json(line, "output of a process"));
  }
  return records;
}

// What there is to measure on this machine.
struct Found {
  bool mpi, gloo;

  static Found look(BenchReport& report) {
    std::string mpirun;
    try {
      mpirun = run_program({"mpirun", "--version"});
    } catch (const engine::IoError&) {
    }
    const Found found{.mpi = mpirun.find("Open MPI") != std::string::npos,
                      .gloo = !program("gloo_process").empty()};
    const std::string& version = mpirun.substr(0, mpirun.find('\n'));
    report.note(found.mpi ? version : "MPI is left out: mpirun in PATH is none of Open MPI's");
    if (!found.gloo) report.note("Gloo is left out: its headers were not there at the build");
    return found;
  }
};

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double median_of(const std::vector<double>& values) {
  return values.empty() ? kNone : median(values);
}

constexpr std::array kCalls = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"};
const std::map<std::int64_t, const char*> kSizes = {
    {1024, "1 KB"}, {1 << 20, "1 MB"}, {40'000'000, "40 MB"}};

std::string name_of(const std::string& call, std::int64_t nbytes, int num) {
  return fmt::format("{} {}, {} processes", call, kSizes.at(nbytes), num);
}

// The wanted rows of `num` processes.
std::vector<std::string> wanted_calls(const BenchConfig& config, int num) {
  std::vector<std::string> rows;
  for (const auto& [nbytes, size] : kSizes) {
    for (const char* call : kCalls) {
      if (const auto row = name_of(call, nbytes, num); config.wants(row)) rows.push_back(row);
    }
  }
  return rows;
}

void bench_calls(const BenchConfig& config, const Found& found, BenchReport& report) {
  const std::string samples = std::to_string(config.samples);
  const Words options = {"--samples=" + samples, "--steps=0"};
  for (const int num : {2, 4}) {
    const std::vector<std::string> rows = wanted_calls(config, num);
    if (rows.empty()) continue;
    // Ours and MPI's own, ours and Gloo's own: by row what the rounds took.
    std::array<std::map<std::string, std::vector<double>>, 4> us;
    const auto add = [&](std::size_t side, const std::string& output) {
      for (const nlohmann::json& record : records_of(output)) {
        us[side][name_of(record.at("call"), record.at("nbytes"), num)].push_back(record.at("us"));
      }
    };
    for (std::int64_t round = 0; round < config.rounds; ++round) {
      if (found.mpi) {
        add(0, ours_over_mpi(num, options));
        add(1, under_mpirun(num, {program("open_mpi_process"), samples}));
      }
      if (found.gloo) {
        add(2, ours_over_gloo(num, options));
        add(3, gloos_own(num, samples));
      }
    }
    report.begin_table(
        "processes",
        fmt::format("Collectives of f32 between {} processes of this machine, us: ours, and those "
                    "of Open MPI and Gloo, {} rounds in turn. ratio: theirs to ours over the same",
                    num, config.rounds),
        {"collective", "mpi_us", "open_mpi_us", "ratio", "gloo_us", "gloos_own_us", "gloo_ratio"});
    for (const std::string& row : rows) {
      const auto at = [&](std::size_t side) { return median_of(us[side][row]); };
      report.row({row, at(0), at(1), Cell(at(1) / at(0), 2), at(2), at(3), Cell(at(3) / at(2), 2)});
    }
  }
}

void bench_trainings(const BenchConfig& config, const Found& found, BenchReport& report) {
  report.begin_table(
      "process_steps",
      fmt::format("Training steps of 2 ranks that are threads or processes, ms: {} rounds in turn "
                  "of {} steps each. mpi_ratio, gloo_ratio: threads to processes; torch: PyTorch's "
                  "processes over Gloo; torch_ratio: those to ours over Gloo",
                  config.rounds, config.steps),
      {"training", "threads_ms", "mpi_ms", "mpi_ratio", "gloo_ms", "gloo_ratio", "torch_ms",
       "torch_ratio"});
  if (config.python.empty()) {
    report.note("PyTorch is left out: bench.python names no interpreter");
  }
  for (std::size_t i = 0; i < process_rows().size(); ++i) {
    const TrainingRow& row = process_rows()[i];
    if (!config.wants(row.name())) continue;
    const Words options = {"--samples=0", fmt::format("--steps={}", config.steps),
                           fmt::format("--row={}", i)};
    std::vector<double> threads, mpi, gloo, torch;
    const auto add = [](std::vector<double>& ms, const std::string& output) {
      for (const nlohmann::json& record : records_of(output)) ms.push_back(record.at("step_ms"));
    };
    for (std::int64_t round = 0; round < config.rounds; ++round) {
      threads.push_back(median(run_training(row, config.steps).step_ms));
      if (found.mpi) add(mpi, ours_over_mpi(row.ranks, options));
      if (found.gloo) add(gloo, ours_over_gloo(row.ranks, options));
      if (!config.python.empty()) {
        torch.push_back(
            run_peer({config.python, config.peer}, row, config.steps).step_ms.median_ms);
      }
    }
    const double ms = median(threads);
    report.row({row.name(), ms, median_of(mpi), Cell(ms / median_of(mpi), 2), median_of(gloo),
                Cell(ms / median_of(gloo), 2), median_of(torch),
                Cell(median_of(torch) / median_of(gloo), 2)});
  }
}

}  // namespace

void bench_processes(const BenchConfig& config, BenchReport& report) {
  const Found found = Found::look(report);
  bench_calls(config, found, report);
  bench_trainings(config, found, report);
}

}  // namespace tessera::tools
