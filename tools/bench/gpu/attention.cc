#include "tools/bench/gpu/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "engine/copy.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/parameter.h"
#include "engine/stream.h"
#include "engine/tape.h"
#include "ops/attention.h"
#include "tools/bench/training/launches.h"
#include "tools/rates/timing.h"

namespace tessera::tools {

using engine::BFloat16;
using engine::DType;
using engine::Parameter;
using engine::require;
using engine::Tape;
using engine::Tensor;
using ops::CudaAttention;

namespace {

constexpr std::pair<const char*, CudaAttention> kKernels[] = {{"mma", CudaAttention::kMma},
                                                              {"wgmma", CudaAttention::kWgmma}};

struct AttentionSize {
  std::int64_t batch, tokens, heads, head_size;
};

// What one kind of kernels computes, and how long it takes.
struct AttentionRun {
  std::vector<BFloat16> y, dqkv;
  LaunchLog log = {};
};

// Of the largest element: roundings of probabilities, and of results, to bf16.
constexpr double kMostApart = 0.02;

// The largest difference, as a part of the largest element.
double distance(const std::vector<BFloat16>& got, const std::vector<BFloat16>& want) {
  double largest = 0, apart = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double x = want[i].to_float(), other = got[i].to_float();
    if (std::isnan(other)) return std::numeric_limits<double>::quiet_NaN();
    largest = std::max(largest, std::abs(x));
    apart = std::max(apart, std::abs(other - x));
  }
  return largest > 0 ? apart / largest : apart;
}

// Returns whether all results are near each other.
bool report_runs(const AttentionSize& size, const std::vector<AttentionRun*>& runs,
                 const Ceilings& ceilings, BenchReport& report) {
  bool are_near = true;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    for (const KernelTimes& k : runs[i]->log.kernels()) {
      const bool is_forward = k.name == "attention.forward";
      if (!is_forward && k.name != "attention.backward") continue;
      const Measurement t = Measurement::of(k.ms);
      const double gflop_per_s = k.call_flops / t.median_ms * 1e-6;
      const double apart =
          is_forward ? distance(runs[i]->y, runs[0]->y) : distance(runs[i]->dqkv, runs[0]->dqkv);
      report.row({k.name, kKernels[i].first, size.batch, size.tokens, size.heads, size.head_size,
                  Cell(t.median_ms, 3), Cell(t.min_ms, 3), Cell(t.max_ms, 3),
                  Cell(gflop_per_s * 1e-3), Cell(ceilings.percent(gflop_per_s, 0)),
                  Cell(apart, 5)});
      are_near &= apart <= kMostApart;  // not NaN
    }
  }
  return are_near;
}

bool measure(const AttentionSize& size, std::int64_t num_samples, const Ceilings& ceilings,
             BenchReport& report) {
  std::vector<AttentionRun> all(std::size(kKernels));
  std::vector<engine::Stream> streams;
  std::vector<AttentionRun*> runs;
  const std::int64_t width = size.heads * size.head_size;
  for (std::size_t i = 0; i < all.size(); ++i) {
    streams.push_back(engine::Stream::cuda("compute", 0, {.listener = &all[i].log}));
    try {
      ops::require_attention_kernels(streams[i], kKernels[i].second);
    } catch (const engine::InvalidArgument& e) {
      report.note(fmt::format("skipped {}: {}", kKernels[i].first, e.what()));
      continue;
    }
    runs.push_back(&all[i]);
  }
  for (std::int64_t sample = -2; sample < num_samples; ++sample) {
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const engine::Memory memory(streams[i]);
      Tape tape(memory, streams[i]);
      Parameter qkv{.name = "qkv",
                    .shape = {size.batch, size.tokens, 3 * width},
                    .init = engine::Init::normal(1)};
      Parameter dy{
          .name = "dy", .shape = {size.batch, size.tokens, width}, .init = engine::Init::normal(1)};
      engine::materialize({&qkv, &dy}, memory, 1, DType::kBF16);
      if (sample == 0) runs[i]->log.clear();
      tape.watch(qkv.value);
      const Tensor y =
          ops::attention(tape, qkv.value, {.num_heads = size.heads, .cuda = kKernels[i].second});
      const Tensor scalar = Tensor::zeros(memory, {}, DType::kF32, "scalar");
      tape.record("scalar", scalar, [&](const Tensor&) { tape.pass_grad(y, dy.value); });
      tape.backward(scalar);
      streams[i].synchronize();
      if (sample + 1 < num_samples) continue;
      runs[i]->y = engine::to_vector<BFloat16>(y);
      runs[i]->dqkv = engine::to_vector<BFloat16>(tape.grad(qkv.value));
    }
  }
  return report_runs(size, runs, ceilings, report);
}

}  // namespace

void measure_attention(const std::vector<TrainingRow>& rows, std::int64_t num_samples,
                       const Ceilings& ceilings, const std::function<bool()>& is_late,
                       BenchReport& report) {
  report.begin_table("attention",
                     fmt::format("A layer's attention, median of {}; ceiling_pct: of the bf16 "
                                 "products that the GPU reaches; apart: from mma, as a part of the "
                                 "largest element",
                                 num_samples),
                     {"launch", "kernels", "batch", "tokens", "heads", "head_size", "ms", "min_ms",
                      "max_ms", "tflop_per_s", "ceiling_pct", "apart"});
  const auto measure_all = [&] {
    bool are_near = true;
    for (const TrainingRow& row : rows) {
      const std::int64_t heads = row.model.heads, head_size = row.model.dim / heads;
      for (const std::int64_t factor : {1, 2}) {
        if (heads % factor != 0 || head_size * factor > 128) continue;
        if (is_late()) {
          report.note("skipped for lack of time: further attention");
          return are_near;
        }
        are_near &= measure({row.batch, row.model.seq, heads / factor, head_size * factor},
                            num_samples, ceilings, report);
      }
    }
    return are_near;
  };
  require(measure_all(), "[bench] expected results within {} of those of mma, see apart above",
          kMostApart);
}

}  // namespace tessera::tools
