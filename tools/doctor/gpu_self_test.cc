// The part of the self test that each GPU does alone, and what becomes of all of it.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/gemm/gemm_cuda.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "tools/doctor/self_test.h"
#include "tools/machine/limits.h"
#include "tools/rates/machine_rates.h"

namespace tessera::tools {

using engine::DType;
using engine::MatrixView;
using engine::Memory;
using engine::Stream;
using engine::Tensor;

Product gpu_product(int gpu, DType dtype) {
  return [gpu, dtype](MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c) {
    const Stream stream = Stream::cuda("self test", gpu);
    const Memory memory(stream);
    const auto operand = [&](const MatrixView<const float>& m) {
      const std::span<const float> values(m.data, static_cast<std::size_t>(m.rows * m.cols));
      const Tensor wide = Tensor::from<float>(memory, {m.rows, m.cols}, values, "operand");
      if (dtype == DType::kF32) return wide;
      const Tensor narrow = Tensor::empty(memory, wide.shape(), dtype, "operand");
      engine::launch_assign_or_add(stream, narrow, wide, false, "narrow");
      return narrow;
    };
    const Tensor x = operand(a), y = operand(b);
    const Tensor z = Tensor::empty(memory, {c.rows, c.cols}, DType::kF32, "product");
    const engine::DeviceProduct product{.a = engine::device_matrix(x, a.rows, a.cols),
                                        .b = engine::device_matrix(y, b.rows, b.cols),
                                        .c = engine::device_matrix(z, c.rows, c.cols)};
    stream.launch(
        {.name = "product"}, [] {},
        [&](const auto& on) { engine::gemm_cuda(on, memory, product); });
    std::ranges::copy(engine::to_vector<float>(z), c.data);
  };
}

GpuFigures try_gpu(int gpu) {
  constexpr std::int64_t kNumSamples = 3;
  // Tensor cores cut off what lies below the largest of the terms that they add at a time.
  constexpr double kUnit = 0x1p-22;
  GpuFigures figures{.gpu = gpu};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string wrong = wrong_product(gpu_product(gpu, dtype), dtype, kUnit);
    if (!wrong.empty()) figures.wrong += fmt::format(" {} in {}", wrong, name_of(dtype));
  }
  if (figures.wrong.empty()) {
    figures.rates = measure_gpu(gpu, quick_side(gpu), kNumSamples);
  }
  return figures;
}

Checks check_gpu_products(const std::vector<GpuFigures>& gpus) {
  // GPUs from 8.0 on have 10 to 100 f32 operations a byte, and bf16 at 2 to 16 times that rate.
  constexpr double kFewOperationsPerByte = 4, kLittleFaster = 1.2, kBelowTheBest = 0.75;
  constexpr double kSlowLinkGbPerS = 6;  // PCIe 3.0 x16 takes about 12
  GpuRates best;
  for (const GpuFigures& g : gpus) {
    best.f32_gflop_per_s = std::max(best.f32_gflop_per_s, g.rates.f32_gflop_per_s);
    best.bf16_gflop_per_s = std::max(best.bf16_gflop_per_s, g.rates.bf16_gflop_per_s);
    best.copy_gb_per_s = std::max(best.copy_gb_per_s, g.rates.copy_gb_per_s);
  }
  Checks checks;
  for (const GpuFigures& g : gpus) {
    const GpuRates& r = g.rates;
    Check& check = checks.emplace_back(Check{.name = fmt::format("gpu {}", g.gpu)});
    if (!g.wrong.empty()) {
      check.verdict = Verdict::kFail;
      check.found = "wrong values:" + g.wrong;
      check.fix = fmt::format(
          "do not train on it (CUDA_VISIBLE_DEVICES without {}); nvidia-smi -q -d ECC, and dmesg "
          "for Xid errors, tell whether it is broken",
          g.gpu);
      continue;
    }
    check.found = fmt::format(
        "values right; products: {:.1f} TFLOP/s in f32, {:.1f} in bf16; copies: {:.0f} GB/s "
        "inside, {:.1f} GB/s from the host; for plan in bf16: {}",
        r.f32_gflop_per_s * 1e-3, r.bf16_gflop_per_s * 1e-3, r.copy_gb_per_s, r.pinned_gb_per_s,
        rates_flags({.flops_per_s = r.bf16_gflop_per_s * 1e9,
                     .bytes_per_s = r.copy_gb_per_s * 1e9,
                     .link_bytes_per_s = 0,
                     .link_latency_s = 0,
                     .host_link_bytes_per_s = r.pinned_gb_per_s * 1e9,
                     .host_bytes_per_s = g.host_gb_per_s * 1e9}));
    check.facts.add("f32_gflop_per_s", r.f32_gflop_per_s)
        .add("bf16_gflop_per_s", r.bf16_gflop_per_s)
        .add("copy_gb_per_s", r.copy_gb_per_s)
        .add("pinned_gb_per_s", r.pinned_gb_per_s)
        .add("host_gb_per_s", g.host_gb_per_s);
    const auto warn = [&](bool is_low, const char* fix) {
      if (!is_low || check.verdict != Verdict::kOk) return;
      check.verdict = Verdict::kWarn;
      check.fix = fix;
    };
    warn(r.f32_gflop_per_s < kBelowTheBest * best.f32_gflop_per_s ||
             r.bf16_gflop_per_s < kBelowTheBest * best.bf16_gflop_per_s ||
             r.copy_gb_per_s < kBelowTheBest * best.copy_gb_per_s,
         "another GPU of this machine does a third more: all ranks wait for this one; nvidia-smi "
         "shows who else uses it, -q -d PERFORMANCE why its clocks are low");
    warn(
        r.f32_gflop_per_s < kFewOperationsPerByte * r.copy_gb_per_s ||
            r.bf16_gflop_per_s < kLittleFaster * r.f32_gflop_per_s,
        "products are slow next to copies, or bf16 next to f32: nvidia-smi -q -d CLOCK,PERFORMANCE "
        "says whether the clocks are held down, and nvidia-smi who else uses it");
    warn(r.pinned_gb_per_s < kSlowLinkGbPerS,
         "the link to the host is narrow, which offload suffers from: nvidia-smi -q says the PCIe "
         "generation and width that it has and could have");
  }
  return checks;
}

Checks gpu_self_test(int num_gpus, bool has_nccl) {
  constexpr std::int64_t kNumel = 1'000'003;
  Checks checks;
  const auto attempt = [&](const std::string& name, const auto& fn) {
    try {
      fn();
    } catch (const std::exception& e) {
      checks.push_back({.name = name,
                        .verdict = Verdict::kFail,
                        .found = e.what(),
                        .fix = "trainings would fail in the same way; nvidia-smi and dmesg say "
                               "whether the GPU is well and whether another program fills it"});
    }
  };
  std::vector<GpuFigures> figures;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    attempt(fmt::format("gpu {}", gpu), [&] { figures.push_back(try_gpu(gpu)); });
  }
  if (!figures.empty()) {
    const double host = host_bytes_per_s(num_gpus, read_limits().usable_cores()) * 1e-9;
    for (GpuFigures& f : figures) f.host_gb_per_s = host;
  }
  for (Check& check : check_gpu_products(figures)) checks.push_back(std::move(check));
  if (num_gpus < 2 || !has_nccl) return checks;
  attempt("gpu collectives", [&] {
    for (Check& check : check_gpu_collectives(num_gpus, kNumel)) {
      checks.push_back(std::move(check));
    }
  });
  return checks;
}

}  // namespace tessera::tools
