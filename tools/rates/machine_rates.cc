#include "tools/rates/machine_rates.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "comm/threads.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "tools/launch/product_rate.h"
#include "tools/machine/limits.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::Tensor;

constexpr std::int64_t kCopyNumel = 8 << 20, kGatherNumel = 1 << 20;  // of f32, of each rank
constexpr int kNumSamples = 11;

// Times of `fn`, which all ranks begin together.
void sample(comm::ProcessGroup& world, std::vector<double>& ms, const std::function<void()>& fn) {
  for (int s = -1; s < kNumSamples; ++s) {  // one that does not count
    world.barrier("rates");
    const Timer timer;
    fn();
    if (s >= 0) ms.push_back(timer.ms());
  }
}

void time_copies(comm::ProcessGroup& world, std::int64_t numel, std::vector<double>& ms) {
  const engine::Memory memory;
  const Tensor from = Tensor::zeros(memory, {numel}, DType::kF32, "rates");
  const Tensor to = Tensor::zeros(memory, {numel}, DType::kF32, "rates");
  sample(world, ms,
         [&] { std::memcpy(to.raw(), from.raw(), static_cast<std::size_t>(from.nbytes())); });
}

// Of copies of `numel` f32: what is read and what is written.
double copied_per_s(std::int64_t numel, double ms) {
  return 2.0 * sizeof(float) * static_cast<double>(numel) / ms * 1e3;
}

struct RankTimes {
  std::vector<double> copy_ms, gather_ms, empty_ms;
  double flop_per_s = 0;  // of all ranks
  std::int64_t gather_nbytes = 0;
};

RankTimes measure(comm::ProcessGroup& world, DType dtype) {
  const engine::Memory memory;
  const engine::Stream stream = engine::Stream::worker_cpu("rates");
  const auto tensor = [&](std::int64_t numel) {
    return Tensor::zeros(memory, {numel}, DType::kF32, "rates");
  };
  RankTimes times;
  times.flop_per_s = product_flop_per_s(world, dtype, std::chrono::milliseconds(20));
  time_copies(world, kCopyNumel, times.copy_ms);
  const auto gather = [&](std::int64_t numel, std::vector<double>& ms) {
    const Tensor part = tensor(numel), whole = tensor(numel * world.size());
    sample(world, ms, [&] {
      world.all_gather(part, whole, stream, "rates");
      stream.synchronize();
    });
  };
  gather(1, times.empty_ms);
  const std::int64_t sent = world.traffic().bytes_sent;
  gather(kGatherNumel, times.gather_ms);
  times.gather_nbytes = (world.traffic().bytes_sent - sent) / (kNumSamples + 1);
  return times;
}

}  // namespace

engine::MetaRates measure_rates(int num_ranks, DType dtype) {
  std::vector<RankTimes> ranks(static_cast<std::size_t>(num_ranks));
  comm::run_ranks(num_ranks, {}, [&](comm::ProcessGroup& world) {
    ranks[static_cast<std::size_t>(world.rank())] = measure(world, dtype);
  });
  const double copy_ms = median_of_slowest(ranks, &RankTimes::copy_ms);
  const double empty_ms = median_of_slowest(ranks, &RankTimes::empty_ms);
  const double gather_ms = median_of_slowest(ranks, &RankTimes::gather_ms);
  const double link_ms = std::max(gather_ms - empty_ms, gather_ms / 2);
  return {.flops_per_s = ranks[0].flop_per_s / num_ranks,
          .bytes_per_s = copied_per_s(kCopyNumel, copy_ms),
          .link_bytes_per_s = static_cast<double>(ranks[0].gather_nbytes) / link_ms * 1e3,
          .link_latency_s = empty_ms * 1e-3,
          .host_link_bytes_per_s = 0,
          .host_bytes_per_s = host_bytes_per_s(num_ranks, read_limits().usable_cores())};
}

double host_bytes_per_s(int num_ranks, int num_cores) {
  const int num_threads = std::max(1, num_cores / num_ranks);  // of each, as offload has them
  const std::int64_t numel = std::max<std::int64_t>(kCopyNumel / num_threads, 1);
  std::vector<RankTimes> threads(static_cast<std::size_t>(num_ranks * num_threads));
  comm::run_ranks(num_ranks * num_threads, {}, [&](comm::ProcessGroup& world) {
    time_copies(world, numel, threads[static_cast<std::size_t>(world.rank())].copy_ms);
  });
  return num_threads * copied_per_s(numel, median_of_slowest(threads, &RankTimes::copy_ms));
}

int num_rated_ranks(int num_cores) { return std::clamp(num_cores, 2, 8); }

std::string rates_flags(const engine::MetaRates& rates) {
  std::string flags;
  const auto add = [&](const char* name, double value) {
    if (value == 0) return;
    flags += value < 100
                 ? fmt::format("{}--rates.{}={:.3g}", flags.empty() ? "" : " ", name, value)
                 : fmt::format("{}--rates.{}={:.0f}", flags.empty() ? "" : " ", name, value);
  };
  add("gflops", rates.flops_per_s * 1e-9);
  add("memory_gbs", rates.bytes_per_s * 1e-9);
  add("link_gbs", rates.link_bytes_per_s * 1e-9);
  add("link_latency_us", rates.link_latency_s * 1e6);
  add("host_link_gbs", rates.host_link_bytes_per_s * 1e-9);
  add("host_memory_gbs", rates.host_bytes_per_s * 1e-9);
  return flags;
}

}  // namespace tessera::tools
