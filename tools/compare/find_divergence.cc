#include "tools/compare/find_divergence.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/cli/flags.h"
#include "tools/cli/run_files.h"
#include "tools/cli/stop.h"
#include "tools/compare/comparison_folder.h"
#include "tools/compare/request/training_process.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using engine::IoError;
using engine::require;

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  require<IoError>(!error, "[out] expected a folder that can be made, got {} ({})", error.message(),
                   path);
}

void remove(const std::string& path) {
  std::error_code error;
  fs::remove(path, error);
  require<IoError>(!error, "[out] expected a file that can be replaced, got {} ({})",
                   error.message(), path);
}

// Of the training that finds the tensor, and of the one that has its values.
constexpr const char* kProbe = "probe";
constexpr const char* kValues = "values";

// One configuration, in a folder of its own.
class Side {
 public:
  Side(const Configuration& c, const char* letter, const std::string& out, std::string trainer,
       LauncherWords launcher)
      : letter_(letter),
        folder_(out + "/" + letter),
        trainer_(std::move(trainer)),
        launcher_(std::move(launcher)),
        gemms_(c.on_gpu && c.config.cuda.gemm_algorithms.empty() ? out + "/gemm_algorithms.txt"
                                                                 : ""),
        configuration_(c) {
    make_folder(folder_);
    // What an earlier search left must not be taken for this one's.
    for (const char* name :
         {"configuration.toml", "config.toml", "log.jsonl", "comm_hook.txt", "sample.txt"}) {
      remove(path(name));
    }
    for (const std::string& name : engine::names_in_folder(folder_)) {  // of processes, too
      for (const std::string start : {kProbe, kValues}) {
        if (name.starts_with(start + ".")) remove(path(name));
      }
    }
    write_file(path("configuration.toml"), c.toml);
  }

  /// The record, called `name`, and how the training ended; empty: well.
  std::pair<ProbeRun, std::string> train(const std::string& name,
                                         const std::vector<std::string>& more) const {
    const std::string record = path(name + ".jsonl"), console = path(name + ".txt");
    std::vector<std::string> arguments = {"--config=" + path("configuration.toml"),
                                          "--out=" + folder_, "--log.probe=" + record,
                                          "--audit=false"};
    if (!gemms_.empty()) arguments.push_back("--cuda.gemm_algorithms=" + gemms_);
    // Each has a trace of its own: all would write to the one file that was asked for.
    for (std::string& argument : trace_arguments(configuration_, path(name + ".trace.json"))) {
      arguments.push_back(std::move(argument));
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    wait_for_folder(folder_);
    const ProcessEnd end = run_process(trainer_, arguments, console, launcher_);
    require(stop_requested() == 0, "[divergence] expected to go on, got {}",
            signal_name(stop_requested()));
    std::error_code ignored;
    require<IoError>(fs::exists(record, ignored),
                     "[divergence] expected a training that leaves a record, got {}; see {} ({})",
                     end.str(), console, letter_);
    if (end.ok()) return {read_probe_run(record), ""};
    const std::string how = fmt::format("{}; see {}", end.str(), console);
    try {
      return {read_probe_run(record), how};
    } catch (const IoError& error) {  // a process that was killed may have left none
      engine::fail<IoError>("{}; the training ended with {} ({})", error.what(), how, letter_);
    }
  }

 private:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::string letter_, folder_, trainer_;
  LauncherWords launcher_;
  std::string gemms_;  // of both sides, so that they multiply matrices alike; empty: as configured
  const Configuration& configuration_;
};

// The values of the first tensor that differs, from both runs made again.
class SecondRuns {
 public:
  SecondRuns(const Side& a, const Side& b, const Divergence& first)
      : first_(first),
        options_({fmt::format("--log.probe_steps={0}:{0}", first.key.step),
                  "--log.probe_values=" + target_text(first.key)}),
        a_(a.train(kValues, options_).first),
        b_(b.train(kValues, options_).first) {}

  void add_to(DivergenceResult& result) const {
    result.values = difference_of(values(a_, first_.a), values(b_, first_.b));
    for (const auto& [letter, run, side] :
         {std::tuple("A", &a_, &first_.a), std::tuple("B", &b_, &first_.b)}) {
      const Checksum again = checksum_of(values_of(*run, first_.key), 0);
      if (again.hash == side->checksum.hash) continue;
      result.remark += fmt::format(
          "{}{} does not repeat itself: trained again, this tensor has the checksum {:016x}.",
          result.remark.empty() ? "" : " ", letter, again.hash);
    }
  }

 private:
  std::vector<float> values(const ProbeRun& run, const DivergentSide& side) const {
    return values_of(run, first_.key, side.other_rank);
  }

  const Divergence& first_;
  std::vector<std::string> options_;
  ProbeRun a_, b_;
};

DivergenceResult of_records(const std::vector<std::string>& paths) {
  const ProbeRun a = read_probe_run(paths[0]), b = read_probe_run(paths[1]);
  DivergenceResult result{.a = {.name = a.path, .path = a.path, .header = a.header},
                          .b = {.name = b.path, .path = b.path, .header = b.header},
                          .report = compare_probes(a, b)};
  for (const auto& [letter, run] : {std::pair("A", &a), std::pair("B", &b)}) {
    if (!run->is_unfinished) continue;
    result.remark +=
        fmt::format("{} went wrong in step {}, and has a part of it. ", letter, run->last_step);
  }
  if (result.report.first) {
    result.remark += "Records store checksums only; give the two configurations to see values.";
  }
  return result;
}

DivergenceResult of_configurations(const Request& request, const std::string& out) {
  const Configuration& first = request.configurations[0];
  const Configuration& second = request.configurations[1];
  const std::string trainer = program_path(request.compare.trainer);
  const Side side_a(first, "a", out, trainer, request.launcher_of(first));
  const Side side_b(second, "b", out, trainer, request.launcher_of(second));
  const auto [a, failure_a] = side_a.train(kProbe, {});
  const auto [b, failure_b] = side_b.train(kProbe, {});
  DivergenceResult result{
      .a = {.name = first.name, .path = a.path, .header = a.header, .failure = failure_a},
      .b = {.name = second.name, .path = b.path, .header = b.header, .failure = failure_b},
      .report = compare_probes(a, b)};
  if (!result.report.first) return result;
  try {
    SecondRuns(side_a, side_b, *result.report.first).add_to(result);
  } catch (const engine::Error& e) {  // what was found is worth telling without
    result.remark = fmt::format("No values: {}", e.what());
  }
  return result;
}

// Records may be those that an earlier search left: of records, only their comparison is written.
void check_inputs(const Request& request, const std::string& out, const std::string& json_path) {
  const std::vector<RunFile> written = {{"out", json_path}, {"the lock of out", out + "/.lock"}};
  check_files_differ(written, request.inputs);
  if (request.records.empty()) {
    check_files_outside(request.inputs, {"the search for a divergence", out});
  }
}

}  // namespace

DivergenceResult find_divergence(const Request& request) {
  const std::string out = resolve_user_path(request.compare.out) + "/divergence";
  const std::string json_path = out + "/divergence.json";
  check_inputs(request, out, json_path);
  make_folder(out);
  const engine::FileDescriptor lock = lock_folder(out);
  remove(json_path);  // of an earlier search
  DivergenceResult result =
      request.records.empty() ? of_configurations(request, out) : of_records(request.records);
  const auto replace = nlohmann::ordered_json::error_handler_t::replace;
  write_file(json_path, to_json(result).dump(1, ' ', false, replace) + "\n");
  return result;
}

}  // namespace tessera::tools
