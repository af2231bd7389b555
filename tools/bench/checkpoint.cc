#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/xxh3.h"
#include "engine/memory.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/cut_values.h"
#include "shard/optimizer/adamw.h"
#include "tools/bench/parts.h"
#include "tools/bench/training/peer.h"
#include "tools/cli/flags.h"
#include "tools/models/family.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kRounds = 3;

/// The folder that is written to, in the output folder: it must lie on a disk.
class BenchFolder {
 public:
  BenchFolder() : path_(resolve_user_path("runs/bench_checkpoint")) { fs::remove_all(path_); }
  ~BenchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Times {
  std::vector<double> save_ms, held_ms, dd_ms, load_ms, read_ms;
  std::int64_t nbytes = 0;
};

std::vector<std::string> files_of_checkpoint(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path().string());
  std::ranges::sort(files);
  return files;
}

// What a reader does at least: every byte of a rank's files to a place of its own, and a checksum.
// `memory`: as much as the largest of them.
void read_files(const std::vector<std::string>& files, int rank, int ranks,
                std::vector<std::byte>& memory) {
  constexpr std::int64_t kPieceNbytes = 1 << 18;
  std::int64_t used = 0;
  for (std::size_t i = static_cast<std::size_t>(rank); i < files.size();
       i += static_cast<std::size_t>(ranks)) {
    const engine::InputFile file(files[i]);
    memory.resize(std::max(memory.size(), static_cast<std::size_t>(used + file.nbytes())));
    engine::Xxh3 checksum;
    for (std::int64_t at = 0; at < file.nbytes(); at += kPieceNbytes) {
      const auto piece = std::span(memory).subspan(
          static_cast<std::size_t>(used + at),
          static_cast<std::size_t>(std::min(kPieceNbytes, file.nbytes() - at)));
      file.read(at, piece);
      checksum.update(piece);
    }
    used += file.nbytes();
    engine::require(checksum.value() != 0, "[bench] expected a checksum");
  }
}

void write_with_dd(const std::string& path, std::int64_t nbytes) {
  run_program({"dd", "if=/dev/zero", fmt::format("of={}", path), "bs=4M",
               fmt::format("count={}", (nbytes + (4 << 20) - 1) >> 22), "conv=fsync",
               "status=none"});
  fs::remove(path);
}

Times measure(const ModelConfig& sizes, int ranks, const std::string& folder) {
  Times times;
  comm::run_ranks(ranks, {.deadline = std::chrono::minutes(10)}, [&](comm::ProcessGroup& world) {
    const bool is_first = world.rank() == 0;
    const engine::Memory memory;
    const engine::Stream compute = engine::Stream::inline_cpu("compute");
    const std::unique_ptr<LanguageModel> model = sizes.make();
    shard::Fsdp fsdp(world, memory, compute, model->blocks(), model->root(), {});
    shard::AdamW optimizer(fsdp, {});
    const std::vector<shard::CheckpointPart> parts = {{&fsdp, &optimizer}};
    shard::Checkpointer plain(world, parts,
                              {.folder = folder + "/plain", .keep = 1, .async = false});
    shard::Checkpointer in_background(world, parts,
                                      {.folder = folder + "/in_background", .keep = 1});
    const auto timed = [&](std::vector<double>& ms, const auto& fn) {
      world.barrier("bench");
      const Timer timer;
      fn();
      world.barrier("bench end");
      if (is_first) ms.push_back(timer.ms());
    };
    std::vector<std::byte> read;
    for (std::int64_t round = 0; round <= kRounds; ++round) {
      const std::int64_t step = round + 1;
      timed(times.save_ms, [&] { plain.save(step, {}); });
      const std::string path = shard::checkpoint_path(folder + "/plain", step);
      const std::vector<std::string> files = files_of_checkpoint(path);
      if (is_first) {
        times.nbytes = 0;
        for (const std::string& file : files) {
          times.nbytes += static_cast<std::int64_t>(fs::file_size(file));
        }
      }
      timed(times.dd_ms, [&] {
        const auto pause = world.pause_deadline();
        if (is_first) write_with_dd(folder + "/dd", times.nbytes);
      });
      timed(times.load_ms, [&] { plain.load(path); });
      timed(times.read_ms, [&] { read_files(files, world.rank(), ranks, read); });
      timed(times.held_ms, [&] {
        in_background.save(step, {});
        shard::CutValues(fsdp).settle();  // as the next update would wait
      });
      in_background.wait();
      // The first of each does not count: files and memory are new.
      if (round == 0 && is_first) times = {};
    }
  });
  return times;
}

double seconds(const nlohmann::json& record, const char* key) {
  return record.at(key).get<double>();
}

}  // namespace

void bench_checkpoint(const BenchConfig& config, BenchReport& report) {
  const BenchFolder folder;
  const double nothing = std::numeric_limits<double>::quiet_NaN();
  report.begin_table(
      "checkpoint",
      measured_presets().front() +
          " with AdamW's moments in f32: saved with every flush, next to `dd conv=fsync` "
          "of as many bytes; loaded from the page cache, next to reading and XXH3 alone; held_ms: "
          "what "
          "training waits for when it is saved meanwhile",
      {"row", "MB", "save_ms", "dd_ms", "ratio", "load_ms", "read_ms", "ratio_load", "held_ms"});
  double nbytes = 0;
  for (const int ranks : {1, 2, 4}) {
    const std::string name = fmt::format("ours, {} rank{}", ranks, ranks == 1 ? "" : "s");
    if (!config.wants(name)) continue;
    const Times t = measure(preset_config(measured_presets().front()), ranks,
                            fmt::format("{}/{}", folder.path(), ranks));
    fs::remove_all(fmt::format("{}/{}", folder.path(), ranks));
    nbytes = static_cast<double>(t.nbytes);
    const double save = median(t.save_ms), dd = median(t.dd_ms), load = median(t.load_ms),
                 read = median(t.read_ms);
    report.row({name, Cell(nbytes * 1e-6, 0), save, dd, Cell(save / dd, 2), load, read,
                Cell(load / read, 2), median(t.held_ms)});
  }
  if (config.python.empty()) {
    report.note("give --bench.python for torch.save and torch.distributed.checkpoint, too");
    return;
  }
  const std::string script = fs::path(config.peer).parent_path() / "torch_checkpoint.py";
  fs::create_directories(folder.path());
  const std::string text = run_program({config.python, script, folder.path()});
  const nlohmann::json record = engine::parse_json(text.substr(text.find('{')), script);
  for (const char* kind : {"torch.save", "dcp"}) {
    const nlohmann::json& r = record.at(kind);
    report.row({fmt::format("{}, 1 process", kind),
                Cell(record.at("nbytes").get<double>() * 1e-6, 0), seconds(r, "save_s") * 1e3,
                nothing, nothing, seconds(r, "load_s") * 1e3, nothing, nothing, nothing});
  }
}

}  // namespace tessera::tools
