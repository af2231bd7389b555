#include "tools/launch/product_rate.h"

#include <algorithm>
#include <span>
#include <vector>

#include "comm/host_gather.h"
#include "engine/gemm/gemm.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::tools {

double product_flop_per_s(comm::ProcessGroup& world, engine::DType dtype,
                          std::chrono::milliseconds time) {
  constexpr std::int64_t kSide = 512;
  constexpr int kNumWindows = 3;
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<float>;
  const engine::Memory memory;
  engine::Products products(engine::Stream::inline_cpu("compute"));
  const engine::Tensor a = engine::Tensor::zeros(memory, {kSide, kSide}, dtype);
  const engine::Tensor b = engine::Tensor::zeros(memory, {kSide, kSide}, dtype);
  const engine::Tensor c = engine::Tensor::zeros(memory, {kSide, kSide}, engine::DType::kF32);
  const auto multiply = [&] {
    engine::dispatch_float(dtype, "product_rate", [&](auto type) {
      using T = decltype(type);
      engine::gemm(products, memory, engine::matrix<const T>(a, kSide, kSide),
                   engine::matrix<const T>(b, kSide, kSide), engine::matrix<float>(c, kSide, kSide),
                   false);
    });
  };
  multiply();  // makes the kernel
  double best = 0;
  for (int window = 0; window < kNumWindows; ++window) {
    world.barrier("product_rate");
    const Clock::time_point begin = Clock::now();
    float num_products = 0;
    do {
      multiply();
      ++num_products;
    } while (Clock::now() - begin < time);
    // From one beginning to the last end: ranks that share a core are not counted as if they had
    // two.
    const std::vector<float> mine = {num_products, Seconds(Clock::now() - begin).count()};
    const std::vector<float> all = comm::gather_to_host<float>(
        world, mine, memory, engine::Stream::worker_cpu("product_rate"), "product_rate");
    float total = 0, seconds = 0;
    for (std::size_t i = 0; i < all.size(); i += 2) {
      total += all[i];
      seconds = std::max(seconds, all[i + 1]);
    }
    best = std::max(best, static_cast<double>(total) * engine::gemm_flops(kSide, kSide, kSide) /
                              static_cast<double>(seconds));
  }
  return best;
}

}  // namespace tessera::tools
