// Products, copies and collectives on this machine, for about two seconds, and on each of its GPUs:
// whether they are right, and how fast, compared with what the machine itself does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/dtype.h"
#include "engine/gemm/gemm.h"
#include "tools/doctor/check.h"
#include "tools/rates/gpu_rates.h"

namespace tessera::tools {

/// C = A B of f32, for tests to hand in a wrong one.
using Product = std::function<void(engine::MatrixView<const float> a,
                                   engine::MatrixView<const float> b, engine::MatrixView<float> c)>;
/// engine::gemm().
Product engine_product();

/// A product by cublasLt on a GPU, of operands rounded to `dtype`; values come from the host and go
/// there. Throws DeviceError.
Product gpu_product(int gpu, engine::DType dtype);
/// What is wrong with a product of odd sizes, whose operands are of `dtype`, by sums in double;
/// empty: nothing. Each addition may be off by `unit` of the magnitude of its terms.
std::string wrong_product(const Product& product, engine::DType dtype = engine::DType::kF32,
                          double unit = 0x1p-24);

/// How fast one thread's matrix product is, compared with what it multiplies and adds in registers;
/// and every element of a product, compared with a sum in double. kFail if the values are wrong,
/// kWarn below half of the peak.
Check check_product(const Product& product);
/// All ranks' values of an all_gather and a reduce_scatter between `num_ranks` threads, computed
/// again element by element, and their rate, compared with memcpy by as many threads. kFail if a
/// value is wrong, kWarn where they take over four times as long. `wrap` may stand between a rank
/// and its group (tests); null: nothing.
using Wrap = std::function<void(comm::ProcessGroup& world,
                                const std::function<void(comm::ProcessGroup&)>& run)>;
Checks check_collectives(int num_ranks, const Wrap& wrap = nullptr);

/// What was found on one GPU.
struct GpuFigures {
  int gpu = 0;
  std::string wrong = {};  ///< values of a product; empty: none
  GpuRates rates = {};
  double host_gb_per_s = 0;  ///< of the host's memory, by as many of its threads as a GPU has
};
/// Products of f32 and bf16 on that GPU, and what it reaches, but for host_gb_per_s. Throws
/// DeviceError.
GpuFigures try_gpu(int gpu);
/// A line for each: kFail if values are wrong, kWarn for a rate that is low compared with another
/// of the same GPU (products with copies in its memory, bf16 with f32) or with the best GPU of this
/// machine, or below what any PCIe x16 link takes from page-locked memory.
Checks check_gpu_products(const std::vector<GpuFigures>& gpus);
/// As check_collectives(), between GPUs over NCCL, `numel` elements a rank; the rate is compared
/// with a copy inside each GPU. Throws CommError, DeviceError.
Checks check_gpu_collectives(int num_gpus, std::int64_t numel, const Wrap& wrap = nullptr);
/// The checks of all of a machine's GPUs, each in a few seconds; none for none. `has_nccl`: NCCL
/// can be used.
Checks gpu_self_test(int num_gpus, bool has_nccl);

/// All checks of the CPU, with what may be used. kWarn for what that leaves no memory for, kFail
/// for what throws.
Checks self_test(int num_cores, std::int64_t usable_nbytes);

}  // namespace tessera::tools
