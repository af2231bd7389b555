#include <fmt/format.h>

#include <vector>

#include "engine/tape.h"
#include "ops/gelu.h"
#include "tools/bench/parts.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using engine::Stream;
using engine::Tensor;

constexpr int kNumOps = 1000;

struct Times {
  std::vector<double> forward_us, backward_us;  // of an op
};

// A chain of ops on one element: what is left is what the host does around them.
Times run(const Stream& compute, std::int64_t num_samples) {
  const engine::Memory memory(compute);
  engine::Tape tape(memory, compute);
  const Tensor x = Tensor::zeros(memory, {1}, engine::DType::kF32, "x");
  Times times;
  for (std::int64_t s = -2; s < num_samples; ++s) {  // two that do not count
    tape.watch(x);
    const Timer timer;
    Tensor y = x;
    for (int i = 0; i < kNumOps; ++i) y = ops::gelu(tape, y);
    const double forward_us = timer.ms() * 1e3 / kNumOps;
    const Timer backward;
    tape.backward(y);
    const double backward_us = backward.ms() * 1e3 / kNumOps;
    compute.synchronize();
    tape.clear();
    if (s < 0) continue;
    times.forward_us.push_back(forward_us);
    times.backward_us.push_back(backward_us);
  }
  return times;
}

}  // namespace

void bench_host(const BenchConfig& config, BenchReport& report) {
  report.begin_table("host",
                     fmt::format("What the host does for an op besides its work: {} ops on one "
                                 "element, without a listener",
                                 kNumOps),
                     {"stream", "forward_us", "backward_us"});
  for (const Stream& compute : {Stream::inline_cpu("inline"), Stream::worker_cpu("worker")}) {
    if (!config.wants(compute.name())) continue;
    const Times times = run(compute, config.samples);
    report.row(
        {compute.name(), Cell(median(times.forward_us), 2), Cell(median(times.backward_us), 2)});
  }
}

}  // namespace tessera::tools
