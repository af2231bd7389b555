#include "tools/rates/gpu_rates.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/gemm_cuda.h"
#include "engine/memory.h"
#include "engine/parameter.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "tools/rates/timing.h"

namespace tessera::tools {

using engine::DType;
using engine::Memory;
using engine::Stream;
using engine::Tensor;

namespace {

// The time of `launch` on `stream`, several at a time so that the host is out of the way.
double median_ms(const Stream& stream, std::int64_t num_samples,
                 const std::function<void()>& launch) {
  constexpr int kCalls = 8;
  const auto times = time_in_turn({[&] {
                                    for (int call = 0; call < kCalls; ++call) launch();
                                    stream.synchronize();
                                  }},
                                  num_samples);
  return times[0].median_ms / kCalls;
}

// A GPU multiplies zeros faster than numbers. Repeats, so that drawing takes no time.
std::vector<float> normal_values(std::int64_t numel) {
  constexpr std::int64_t kPeriod = 1'000'003;
  std::vector<float> values(static_cast<std::size_t>(numel));
  const std::int64_t drawn = std::min(numel, kPeriod);
  engine::Init::normal(1).write(values.data(), 0, drawn, "rates", 1);
  for (std::int64_t i = drawn; i < numel; ++i) {
    values[static_cast<std::size_t>(i)] = values[static_cast<std::size_t>(i - drawn)];
  }
  return values;
}

double product_gflop_per_s(const Stream& stream, const engine::Memory& memory, const Tensor& a,
                           std::int64_t num_samples) {
  const std::int64_t side = a.dim(0);
  const Tensor c = Tensor::empty(memory, a.shape(), a.dtype(), "c");
  const engine::DeviceProduct product{.a = engine::device_matrix(a, side, side),
                                      .b = engine::device_matrix(a, side, side),
                                      .c = engine::device_matrix(c, side, side)};
  const double ms = median_ms(stream, num_samples, [&] {
    stream.launch(
        {.name = "product"}, [] {},
        [&](const auto& on) { engine::gemm_cuda(on, memory, product); });
  });
  return engine::gemm_flops(side, side, side) / ms * 1e-6;
}

}  // namespace

GpuRates measure_gpu(int gpu, std::int64_t side, std::int64_t num_samples) {
  const Stream stream = Stream::cuda("rates", gpu);
  const Memory memory(stream);
  GpuRates rates;
  {
    const Tensor x = Tensor::zeros(memory, {4, side, side}, DType::kF32, "x");
    const Tensor y = Tensor::zeros(memory, x.shape(), DType::kF32, "y");
    const Tensor on_host = Tensor::zeros(Memory::pinned(stream), x.shape(), DType::kF32, "pinned");
    const auto gb_per_s = [&](double times, const std::function<void()>& launch) {
      return times * static_cast<double>(x.nbytes()) / median_ms(stream, num_samples, launch) *
             1e-6;
    };
    rates.copy_gb_per_s = gb_per_s(2, [&] { engine::copy(y, x, stream); });
    rates.add_gb_per_s =
        gb_per_s(3, [&] { engine::launch_assign_or_add(stream, y, x, true, "add"); });
    rates.pinned_gb_per_s = gb_per_s(1, [&] { engine::copy(y, on_host, stream); });
  }
  const Tensor a = Tensor::from<float>(memory, {side, side}, normal_values(side * side), "a");
  const Tensor a16 = Tensor::empty(memory, a.shape(), DType::kBF16, "a16");
  engine::launch_assign_or_add(stream, a16, a, false, "narrow");
  rates.f32_gflop_per_s = product_gflop_per_s(stream, memory, a, num_samples);
  rates.bf16_gflop_per_s = product_gflop_per_s(stream, memory, a16, num_samples);
  return rates;
}

std::int64_t quick_side(int gpu, std::int64_t most) {
  constexpr double kEnoughMs = 2;
  const Stream stream = Stream::cuda("rates", gpu);
  const Memory memory(stream);
  for (std::int64_t side = 128; side < most; side *= 2) {
    const Tensor a = Tensor::from<float>(memory, {side, side}, normal_values(side * side), "a");
    const double gflop_per_s = product_gflop_per_s(stream, memory, a, 1);
    if (engine::gemm_flops(side, side, side) / gflop_per_s * 1e-6 > kEnoughMs) return side;
  }
  return most;
}

}  // namespace tessera::tools
