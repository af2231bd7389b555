// What attention by WGMMA is made of, on a GPU that has it: numbers whose sums are exact, so a
// wrong bit of a descriptor, of the swizzle or of a fragment is seen for what it is.
#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "engine/copy.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "ops/attention.h"
#include "tests/ops/wgmma_products.h"

namespace tessera::ops {
namespace {

using engine::BFloat16;
using engine::DType;
using engine::Stream;
using engine::Tensor;

constexpr std::int64_t kSide = 64;

std::size_t at(std::int64_t row, std::int64_t column) {
  return static_cast<std::size_t>(row * kSide + column);
}

// (64, 64) small integers, of no pattern that a wrong address could repeat.
std::vector<float> integers(std::uint32_t seed) {
  std::vector<float> x(kSide * kSide);
  for (float& v : x) {
    seed = seed * 1664525u + 1013904223u;
    v = static_cast<float>(seed >> 28) - 8;
  }
  return x;
}

Tensor on_gpu(const engine::Memory& memory, const std::vector<float>& x, DType dtype) {
  const Tensor there =
      Tensor::empty(memory, {kSide, kSide}, dtype, "x", engine::Category::kWorkspace);
  engine::copy_from_floats(there, x);
  return there;
}

class CudaWgmmaProductsTest
    : public ::testing::TestWithParam<std::pair<const char*, WgmmaOperands>> {};

TEST_P(CudaWgmmaProductsTest, AreExactForSmallIntegers) {
  const Stream stream = Stream::cuda("compute", 0);
  try {
    require_attention_kernels(stream, CudaAttention::kWgmma);
  } catch (const engine::InvalidArgument& error) {
    // Which CudaAttentionWgmma expects of such a GPU.
    std::cout << error.what() << std::endl;
    return;
  }
  const engine::Memory memory(stream);
  const std::vector<float> a = integers(1), b = integers(2), before = integers(3);
  const Tensor a_here = on_gpu(memory, a, DType::kBF16), b_here = on_gpu(memory, b, DType::kBF16);
  for (const bool accumulate : {false, true}) {
    const Tensor d = on_gpu(memory, before, DType::kF32);
    stream.launch({.name = "products"}, [&] {
      wgmma_products_cuda(stream, GetParam().second, a_here.data<BFloat16>(),
                          b_here.data<BFloat16>(), d.data<float>(), accumulate);
    });
    stream.synchronize();
    const std::vector<float> got = engine::to_vector<float>(d);
    int wrong = 0;
    for (std::int64_t i = 0; i < kSide; ++i)
      for (std::int64_t j = 0; j < kSide; ++j) {
        float want = accumulate ? before[at(i, j)] : 0;
        for (std::int64_t k = 0; k < kSide; ++k) want += a[at(i, k)] * b[at(k, j)];
        if (got[at(i, j)] == want) continue;
        if (++wrong <= 8)
          ADD_FAILURE() << "row " << i << ", column " << j << ": expected " << want << ", got "
                        << got[at(i, j)];
      }
    EXPECT_EQ(wrong, 0) << "of " << kSide * kSide << (accumulate ? ", added to" : "");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Operands, CudaWgmmaProductsTest,
    ::testing::Values(std::pair("KAndK", WgmmaOperands::kKAndK),
                      std::pair("KAndMn", WgmmaOperands::kKAndMn),
                      std::pair("MnAndK", WgmmaOperands::kMnAndK),
                      std::pair("MnAndMn", WgmmaOperands::kMnAndMn),
                      std::pair("RegistersAndK", WgmmaOperands::kRegistersAndK),
                      std::pair("RegistersAndMn", WgmmaOperands::kRegistersAndMn)),
    [](const auto& param) { return std::string(param.param.first); });

}  // namespace
}  // namespace tessera::ops
