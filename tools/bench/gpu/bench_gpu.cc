// Times Tessera on a GPU next to PyTorch, and its kernels next to what the GPU reaches.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "engine/error.h"
#include "ops/attention.h"
#include "tools/bench/gpu/attention.h"
#include "tools/bench/gpu/device.h"
#include "tools/bench/parts.h"
#include "tools/bench/training/peer.h"
#include "tools/bench/training/training.h"
#include "tools/cli/main.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

struct GpuConfig {
  std::string models = measured_presets()[0] + "," + measured_presets()[1];
  std::string batches = "16,64,max";
  std::string peers = "eager,compile";
  std::int64_t side = 8192;
  std::int64_t memory_mib = 0;
  double limit_s = 0;
  bool graph = false;
  ops::CudaAttention attention = ops::CudaAttention::kAuto;
};

class GpuBench {
 public:
  explicit GpuBench(const GpuConfig& gpu) : gpu_(gpu) {}

  void device(const BenchConfig& config, BenchReport& report) { ceilings(config, report); }
  void gemm(const BenchConfig& config, BenchReport& report);
  void attention(const BenchConfig& config, BenchReport& report);
  void steps(const BenchConfig& config, BenchReport& report);
  void offload(const BenchConfig& config, BenchReport& report) {
    for (const TrainingRow& row : rows(config)) {
      if (!is_late()) bench_offload(row, config, report);
    }
  }
  void profile(const BenchConfig& config, BenchReport& report);

 private:
  const Ceilings& ceilings(const BenchConfig& config, BenchReport& report) {
    if (!ceilings_) ceilings_ = measure_ceilings(gpu_.side, config.samples, report);
    return *ceilings_;
  }
  std::vector<TrainingRow> rows(const BenchConfig& config) const;
  bool is_late() const { return gpu_.limit_s > 0 && clock_.ms() > gpu_.limit_s * 1e3; }
  std::optional<TrainingTimes> step_row(const TrainingRow& row, const BenchConfig& config,
                                        BenchReport& report);
  void largest_row(TrainingRow row, const BenchConfig& config, BenchReport& report);
  double peer_ms(const TrainingRow& row, const char* mode, const BenchConfig& config,
                 BenchReport& report) const;

  const GpuConfig& gpu_;
  Timer clock_;
  std::optional<Ceilings> ceilings_;
};

// Of each model and each batch that is a number.
std::vector<TrainingRow> GpuBench::rows(const BenchConfig& config) const {
  std::vector<TrainingRow> rows;
  for (const std::string& model : list_of(gpu_.models)) {
    for (const std::string& batch : list_of(gpu_.batches)) {
      if (batch == "max") continue;
      std::int64_t number = 0;
      const auto [end, error] = std::from_chars(batch.data(), batch.data() + batch.size(), number);
      engine::require(error == std::errc() && end == batch.data() + batch.size() && number > 0 &&
                          number <= 1 << 20,
                      "[bench] expected numbers of sequences, and max, got '{}' (bench.batches)",
                      batch);
      TrainingRow row{.model = preset_config(model),
                      .batch = number,
                      .strategy = "ddp",  // one rank has nothing to shard
                      .param = engine::DType::kBF16,
                      .on_gpu = true};
      row.model.cuda_attention = gpu_.attention;
      if (config.wants(row.name())) rows.push_back(row);
    }
  }
  return rows;
}

// The largest multiple of 8 whose step fits into the memory, after one of `batch` that left
// `memory`: what is not activations or scratch stays as it is.
std::int64_t largest_batch(std::int64_t batch, const engine::MemoryStats& memory,
                           std::int64_t memory_mib) {
  constexpr double kUsable = 0.92;  // the rest is for cublasLt, the context and fragments
  const auto peak = [&](engine::Category c) {
    return static_cast<double>(memory.peak_nbytes[static_cast<std::size_t>(c)]);
  };
  const double of_batch = peak(engine::Category::kActivation) + peak(engine::Category::kWorkspace);
  const double other = static_cast<double>(memory.reserved_nbytes) - of_batch;
  const double room = kUsable * static_cast<double>(memory_mib << 20) - other;
  return static_cast<std::int64_t>(room / of_batch * static_cast<double>(batch)) / 8 * 8;
}

double tokens_per_s(const TrainingRow& row, double ms) {
  return static_cast<double>(row.batch * row.model.seq) / ms * 1e3;
}

// PyTorch's step; NaN, and why, if there is none.
double GpuBench::peer_ms(const TrainingRow& row, const char* mode, const BenchConfig& config,
                         BenchReport& report) const {
  const std::vector<std::string> peers = list_of(gpu_.peers);
  if (config.python.empty() || std::ranges::find(peers, mode) == peers.end()) return kNone;
  std::int64_t left_s = 0;
  if (gpu_.limit_s > 0) {
    left_s = static_cast<std::int64_t>(gpu_.limit_s - clock_.ms() * 1e-3);
    if (left_s <= 0) {
      report.note(fmt::format("skipped for lack of time: PyTorch {}, {}", mode, row.name()));
      return kNone;
    }
  }
  try {
    const bool compile = std::string_view(mode) == "compile";
    return run_peer({config.python, config.peer, compile, left_s}, row, config.steps)
        .step_ms.median_ms;
  } catch (const engine::IoError& e) {
    report.note(fmt::format("PyTorch {}, {}: {}", mode, row.name(), e.what()));
    return kNone;
  }
}

// None, and why, if it does not run: a batch may be too large for the memory.
std::optional<TrainingTimes> GpuBench::step_row(const TrainingRow& row, const BenchConfig& config,
                                                BenchReport& report) {
  std::optional<TrainingTimes> ours;
  try {
    ours = run_training(row, config.steps);
  } catch (const engine::DeviceError& e) {
    report.note(fmt::format("{}: {}", row.name(), e.what()));
    return std::nullopt;
  }
  const Measurement mine = Measurement::of(ours->step_ms);
  const bool has_peer = !row.is_graph;  // timed in the row without
  const double eager = has_peer ? peer_ms(row, "eager", config, report) : kNone;
  const double compiled = has_peer ? peer_ms(row, "compile", config, report) : kNone;
  const double tflop_per_s =
      static_cast<double>(row.batch) * row.model.train_flops(row.model.seq) / mine.median_ms * 1e-9;
  constexpr double kMib = 1 << 20;
  report.row({row.name(), Cell(mine.median_ms, 2), Cell(mine.min_ms, 2), Cell(mine.max_ms, 2),
              Cell(tokens_per_s(row, mine.median_ms), 0), Cell(tflop_per_s),
              Cell(ceilings_->percent(tflop_per_s * 1e3, 0)),
              Cell(static_cast<double>(ours->memory.reserved_nbytes) / kMib, 0), Cell(eager, 2),
              Cell(compiled, 2), Cell(eager / mine.median_ms, 2),
              Cell(compiled / mine.median_ms, 2)});
  return ours;
}

void GpuBench::steps(const BenchConfig& config, BenchReport& report) {
  ceilings(config, report);
  report.begin_table(
      "steps",
      fmt::format("Training steps, median of {}; ceiling_pct: of the bf16 products that the GPU "
                  "reaches; eager, compile: PyTorch; ratio: its time to ours",
                  config.steps),
      {"training", "ms", "min_ms", "max_ms", "tokens_per_s", "tflop_per_s", "ceiling_pct",
       "memory_mib", "eager_ms", "compile_ms", "eager_ratio", "compile_ratio"});
  const std::vector<std::string> batches = list_of(gpu_.batches);
  const bool wants_largest = std::ranges::find(batches, "max") != batches.end();
  // Largest batches last: they may be skipped. Of each model, from its last row.
  std::vector<TrainingRow> largest;
  for (const TrainingRow& row : rows(config)) {
    if (is_late()) {
      report.note("skipped for lack of time: " + row.name());
      continue;
    }
    const std::optional<TrainingTimes> times = step_row(row, config, report);
    if (gpu_.graph) {
      TrainingRow graph = row;
      graph.is_graph = true;
      step_row(graph, config, report);
    }
    if (!times || !wants_largest) continue;
    TrainingRow larger = row;
    larger.batch = largest_batch(row.batch, times->memory, gpu_.memory_mib);
    if (!largest.empty() && largest.back().model.layers == row.model.layers) largest.pop_back();
    if (larger.batch > row.batch) largest.push_back(larger);
  }
  for (const TrainingRow& row : largest) {
    if (is_late()) {
      report.note("skipped for lack of time: " + row.name());
    } else {
      largest_row(row, config, report);
    }
  }
}

// With a smaller batch if need be: the estimate knows nothing of fragments.
void GpuBench::largest_row(TrainingRow row, const BenchConfig& config, BenchReport& report) {
  constexpr int kTries = 3;
  for (int i = 0; i < kTries && !step_row(row, config, report); ++i) {
    row.batch = row.batch * 9 / 10 / 8 * 8;
  }
}

void GpuBench::gemm(const BenchConfig& config, BenchReport& report) {
  measure_gemms(
      rows(config), ceilings(config, report), [this] { return is_late(); }, report);
}

void GpuBench::attention(const BenchConfig& config, BenchReport& report) {
  measure_attention(
      rows(config), config.samples, ceilings(config, report), [this] { return is_late(); }, report);
}

void GpuBench::profile(const BenchConfig& config, BenchReport& report) {
  const Ceilings ceiling = ceilings(config, report);
  for (const TrainingRow& row : rows(config)) {
    if (is_late()) {
      report.note("skipped for lack of time: profile of " + row.name());
      continue;
    }
    LaunchLog log(/*by_shape=*/true);
    const TrainingTimes times = run_training(row, config.steps, &log);
    const double step_ms = Measurement::of(times.step_ms).median_ms;
    std::vector<KernelTimes> kernels = log.kernels();
    std::sort(kernels.begin(), kernels.end(), [](const KernelTimes& a, const KernelTimes& b) {
      return a.total_ms() > b.total_ms();
    });
    report.begin_table(
        "profile",
        fmt::format("A step of {} by kernel and shape, mean of {} steps; gflop, mib: "
                    "of a call; ceiling_pct: of what the GPU reaches, bytes or "
                    "bf16 products, whichever is more",
                    row.name(), config.steps),
        {"kernel", "stream", "calls", "gflop", "mib_read", "mib_written", "ms", "share_pct",
         "tflop_per_s", "gb_per_s", "ceiling_pct", "row"});
    const auto steps = static_cast<double>(config.steps);
    double sum_ms = 0;
    for (const KernelTimes& k : kernels) {
      const double ms = k.total_ms() / steps;
      const double gflop_per_s = k.flops / k.total_ms() * 1e-6;
      const double gb_per_s = k.nbytes / k.total_ms() * 1e-6;
      if (k.stream == "compute") sum_ms += ms;
      const auto mib = [](std::int64_t nbytes) {
        return Cell(static_cast<double>(nbytes) / (1 << 20));
      };
      report.row({k.name, k.stream, Cell(static_cast<double>(k.ms.size()) / steps),
                  Cell(k.call_flops * 1e-9), mib(k.call_bytes_read), mib(k.call_bytes_written),
                  Cell(ms, 3), 100 * ms / step_ms, gflop_per_s * 1e-3, gb_per_s,
                  ceiling.percent(gflop_per_s, gb_per_s), row.name()});
    }
    const auto whole = [&](const char* name, double ms) {
      report.row({name, "", kNone, kNone, kNone, kNone, Cell(ms, 3), 100 * ms / step_ms, kNone,
                  kNone, kNone, row.name()});
    };
    whole("between kernels", step_ms - sum_ms);
    whole("whole step, with timers", step_ms);
  }
}

void run(int argc, char** argv) {
  GpuConfig gpu;
  FlagSet flags("bench_gpu", "Times Tessera on a GPU next to PyTorch and to what the GPU reaches.");
  flags.add("bench.models", &gpu.models, {.help = "comma-separated list of model presets"});
  flags.add("bench.batches", &gpu.batches,
            {.help = "comma-separated list of the sequences of a step; max, with "
                     "bench.memory_mib: as many as fit, in steps alone"});
  flags.add("bench.peers", &gpu.peers,
            {.help = "of eager and compile, with bench.python: how PyTorch runs"});
  flags.add("bench.side", &gpu.side,
            {.help = "of the matrices that ceilings are measured with", .min = 16, .max = 32768});
  flags.add("bench.memory_mib", &gpu.memory_mib,
            {.help = "free memory of the GPU, for rows with the largest batch; 0: no such rows",
             .min = 0,
             .max = 1 << 30});
  flags.add("bench.limit_s", &gpu.limit_s,
            {.help = "start nothing more after so many seconds; 0: no limit", .min = 0});
  flags.add("bench.graph", &gpu.graph,
            {.help = "a second row of each training in steps, whose steps are CUDA graphs"});
  flags.add("bench.attention", &gpu.attention,
            EnumOption<ops::CudaAttention>{
                "what computes attention in steps, offload and profile, as cuda.attention of "
                "//tools:train_transformer",
                {{"auto", ops::CudaAttention::kAuto},
                 {"mma", ops::CudaAttention::kMma},
                 {"wgmma", ops::CudaAttention::kWgmma}}});
  GpuBench bench(gpu);
  const auto part = [&](void (GpuBench::*member)(const BenchConfig&, BenchReport&)) {
    return [&bench, member](const BenchConfig& c, BenchReport& r) { (bench.*member)(c, r); };
  };
  BenchConfig defaults;
  defaults.parts = "device,steps,profile";
  run_bench(argc, argv, flags, defaults,
            {{"device", part(&GpuBench::device), {"samples", "side"}},
             {"gemm", part(&GpuBench::gemm), {"models", "batches", "limit_s", "samples", "side"}},
             {"attention",
              part(&GpuBench::attention),
              {"models", "batches", "limit_s", "samples", "side"}},
             {"steps",
              part(&GpuBench::steps),
              {"models", "batches", "limit_s", "samples", "side", "steps", "python", "peer",
               "peers", "memory_mib", "graph", "attention"}},
             {"offload",
              part(&GpuBench::offload),
              {"models", "batches", "limit_s", "rounds", "steps", "attention"}},
             {"profile",
              part(&GpuBench::profile),
              {"models", "batches", "limit_s", "samples", "side", "steps", "attention"}}});
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
