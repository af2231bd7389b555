// Matrix products on a GPU against sums in double: every mix of layouts and dtypes, odd sizes,
// addresses aligned to elements alone; and that algorithms chosen by time are kept.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "engine/copy.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/gemm/gemm_cuda.h"
#include "tests/testing/gradcheck.h"

namespace tessera::engine {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;

struct Case {
  std::int64_t m, n, k;
  DType a = kF32, b = kF32, c = kF32;
  bool a_transposed = false, b_transposed = false, c_transposed = false;
  bool accumulate = false, bias = false;
  float alpha = 1;           // other than 1: from device memory
  std::int64_t offset = 0;   // elements before each operand
  std::int64_t padding = 0;  // elements after each stored row
};

std::string text_of(const Case& c) {
  return fmt::format(
      "({}, {}, {}) {} {} {} transposed {}{}{} accumulate {} bias {} alpha {} offset {} padding {}",
      c.m, c.n, c.k, name_of(c.a), name_of(c.b), name_of(c.c), c.a_transposed, c.b_transposed,
      c.c_transposed, c.accumulate, c.bias, c.alpha, c.offset, c.padding);
}

// A matrix in device memory and its values, row by row of the logical matrix.
struct Operand {
  Operand(const Memory& memory, std::int64_t rows, std::int64_t cols, DType dtype, bool transposed,
          const Case& c, std::uint64_t stream)
      : rows(rows), cols(cols), transposed(transposed) {
    const std::int64_t stored_rows = transposed ? cols : rows;
    ld = (transposed ? rows : cols) + c.padding;
    tensor = to_tensor(memory, {stored_rows, ld},
                       random_values(stored_rows * ld, stream, 1, dtype == kBF16), dtype, c.offset);
  }
  DeviceMatrix view() const { return {tensor.raw(), tensor.dtype(), rows, cols, ld, transposed}; }
  Values values() const {
    const Values stored = to_values(tensor);
    Values v;
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j)
        v.push_back(stored[static_cast<std::size_t>(transposed ? j * ld + i : i * ld + j)]);
    return v;
  }

  std::int64_t rows, cols, ld;
  bool transposed;
  Tensor tensor;
};

// Runs the product and returns C. `bound`: of the difference from `want`.
Values run(const Stream& stream, const Case& c, Values* want = nullptr, Values* bound = nullptr) {
  const Memory memory(stream, {.poison = true});
  const Operand a(memory, c.m, c.k, c.a, c.a_transposed, c, 1);
  const Operand b(memory, c.k, c.n, c.b, c.b_transposed, c, 2);
  Operand out(memory, c.m, c.n, c.c, c.c_transposed, c, 3);
  const Values before = out.values();
  if (!c.accumulate) launch_fill(stream, out.tensor, kPoison, "poison");
  const Tensor bias =
      c.bias ? to_tensor(memory, {c.n}, random_values(c.n, 4, 1, true), c.c, c.offset) : Tensor();
  const std::vector<float> scale_values = {c.alpha, 0, 1};
  const Tensor scales =
      c.alpha != 1 ? Tensor::from<float>(memory, {3}, scale_values, "scales") : Tensor();
  stream.launch(
      {.name = "gemm"}, [] {},
      [&](const auto& cuda_stream) {
        gemm_cuda(cuda_stream, memory,
                  {.a = a.view(),
                   .b = b.view(),
                   .c = out.view(),
                   .accumulate = c.accumulate,
                   .bias = c.bias ? bias.raw() : nullptr,
                   .scales = c.alpha != 1 ? scales.data<float>() : nullptr});
      });
  if (want != nullptr) {
    const Values av = a.values(), bv = b.values(),
                 bias_values = c.bias ? to_values(bias) : Values();
    const auto m = static_cast<std::size_t>(c.m), n = static_cast<std::size_t>(c.n),
               k = static_cast<std::size_t>(c.k);
    want->assign(m * n, 0), bound->assign(m * n, 0);
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t l = 0; l < k; ++l)
        for (std::size_t j = 0; j < n; ++j) {
          const double term = c.alpha * av[i * k + l] * bv[l * n + j];
          (*want)[i * n + j] += term;
          (*bound)[i * n + j] += std::abs(term);
        }
    for (std::size_t at = 0; at < m * n; ++at) {
      const double rest = (c.bias ? bias_values[at % n] : 0) + (c.accumulate ? before[at] : 0);
      const double product = (*want)[at];
      (*want)[at] += rest;
      (*bound)[at] = static_cast<double>(c.k + 3) * 0x1p-24 * ((*bound)[at] + std::abs(rest));
      if (c.c == kBF16) {
        (*bound)[at] += 0x1p-8 * (std::abs((*want)[at]) + (rest != 0 ? std::abs(product) : 0));
      }
    }
  }
  return out.values();
}

// Each element within (K + 3) 2^-24 of the sum of the absolute values of its terms, the bound of an
// f32 sum in any order, and half a unit in the last place of bf16 if it is stored so, or of the
// product as well if something is added to it (gemm_cuda.h).
void check(const Case& c) {
  SCOPED_TRACE(text_of(c));
  const Stream stream = Stream::cuda("compute", 0);
  Values want, bound;
  const Values got = run(stream, c, &want, &bound);
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::abs(got[i] - want[i]) <= bound[i])
        << "[" << i << "]: expected " << want[i] << ", got " << got[i];
  }
  EXPECT_EQ(run(stream, c), got) << "twice";
}

TEST(CudaGemmTest, EveryLayoutAndDtype) {
  for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7})
    for (const auto& [a, b, c] :
         {std::array{kF32, kF32, kF32}, {kBF16, kBF16, kF32}, {kBF16, kBF16, kBF16}})
      for (const bool accumulate : {false, true}) {
        check({.m = 40,
               .n = 24,
               .k = 72,
               .a = a,
               .b = b,
               .c = c,
               .a_transposed = (bits & 1) != 0,
               .b_transposed = (bits & 2) != 0,
               .c_transposed = (bits & 4) != 0,
               .accumulate = accumulate});
      }
}

TEST(CudaGemmTest, MixedDtypes) {
  for (const auto& [a, b, c] :
       {std::array{kF32, kBF16, kF32}, {kBF16, kF32, kBF16}, {kF32, kF32, kBF16}})
    for (const bool accumulate : {false, true}) {
      check({.m = 33, .n = 40, .k = 50, .a = a, .b = b, .c = c, .accumulate = accumulate});
      check({.m = 33,
             .n = 40,
             .k = 50,
             .a = a,
             .b = b,
             .c = c,
             .a_transposed = true,
             .b_transposed = true,
             .accumulate = accumulate,
             .bias = true,
             .alpha = -1.5f});
    }
}

// Leading dimensions that allow the fastest kernels and addresses that do not are among them.
TEST(CudaGemmTest, OddSizesAndAddresses) {
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{1, 1, 1},
                                {1, 33, 31},
                                {33, 1, 65},
                                {31, 33, 130},
                                {8, 16, 24},
                                {1025, 7, 9}})
    for (const DType dtype : {kF32, kBF16})
      for (const std::int64_t offset : {0, 1, 2})
        for (const std::int64_t padding : {0, 3})
          for (const bool bias : {false, true}) {
            check({.m = m,
                   .n = n,
                   .k = k,
                   .a = dtype,
                   .b = dtype,
                   .c = dtype,
                   .b_transposed = true,
                   .accumulate = offset > 0,
                   .bias = bias,
                   .offset = offset,
                   .padding = padding});
          }
}

TEST(CudaGemmTest, ScalesComeFromDeviceMemory) {
  for (const DType dtype : {kF32, kBF16})
    for (const bool accumulate : {false, true})
      check({.m = 40,
             .n = 24,
             .k = 32,
             .a = dtype,
             .b = dtype,
             .accumulate = accumulate,
             .alpha = 0.375f});
}

TEST(CudaGemmTest, WithoutTermsOrElements) {
  check({.m = 5, .n = 7, .k = 0});
  check({.m = 5, .n = 7, .k = 0, .c = kBF16, .accumulate = true, .bias = true});
  check({.m = 0, .n = 7, .k = 3});
  check({.m = 5, .n = 0, .k = 3});
}

TEST(CudaGemmTest, RefusesWhatDoesNotFit) {
  const Stream stream = Stream::cuda("compute", 0);
  const Memory memory(stream);
  const Tensor x = Tensor::zeros(memory, {4, 6}, kF32);
  const auto multiply = [&](const DeviceMatrix& a, const DeviceMatrix& b, const DeviceMatrix& c,
                            const void* bias = nullptr) {
    stream.launch(
        {.name = "gemm"}, [] {},
        [&](const auto& cuda_stream) {
          gemm_cuda(cuda_stream, memory, {.a = a, .b = b, .c = c, .bias = bias});
        });
  };
  const DeviceMatrix wide = device_matrix(x, 4, 6),
                     square = device_matrix(x.slice(0, {4, 4}), 4, 4);
  EXPECT_THROW(multiply(wide, wide, square), InvalidArgument);
  EXPECT_THROW(multiply(wide, wide.t(), wide), InvalidArgument);
  DeviceMatrix overlapping = wide;
  overlapping.ld = 5;
  EXPECT_THROW(multiply(overlapping, wide.t(), square), InvalidArgument);
  EXPECT_THROW(multiply(wide, wide.t(), square.t(), x.raw()), InvalidArgument);
  EXPECT_THROW(device_matrix(x, 4, 5), InvalidArgument);
  stream.synchronize();
}

TEST(CudaGemmTest, ChoicesByTimeAreKeptAndReadBack) {
  if constexpr (kCudaBuilt) {
    const std::vector<Case> cases = {{.m = 64, .n = 48, .k = 96, .a = kBF16, .b = kBF16},
                                     {.m = 31, .n = 33, .k = 37, .accumulate = true}};
    const auto gemms = std::make_shared<std::vector<DeviceProduct>>();
    const auto run_all = [&](const std::shared_ptr<GemmAlgorithms>& algorithms) {
      const Stream stream = Stream::cuda("compute", 0);
      set_gemm_algorithms(stream, algorithms);
      record_gemms(stream, gemms);
      std::vector<Values> results;
      for (const Case& c : cases) {
        for (int i = 0; i < 2; ++i) results.push_back(run(stream, c));
      }
      return results;
    };
    const auto tuned = std::make_shared<GemmAlgorithms>();
    run_all(tuned);  // for the record: without an entry
    EXPECT_EQ(tuned->size(), 0);
    ASSERT_EQ(gemms->size(), cases.size());
    EXPECT_EQ((*gemms)[0].b.cols, 48);
    EXPECT_TRUE((*gemms)[1].accumulate);
    const Stream idle = Stream::cuda("tuning", 0);
    const std::vector<TunedGemm> timed = tune_gemms(idle, *gemms, *tuned);
    ASSERT_EQ(timed.size(), 2u);
    for (const TunedGemm& t : timed) {
      EXPECT_GE(t.num_proposed, 1);
      EXPECT_LE(t.ms, t.first_ms);
      EXPECT_GT(t.ms, 0);
      EXPECT_TRUE(t.algorithm.starts_with("id ")) << t.algorithm;
    }
    EXPECT_TRUE(tune_gemms(idle, *gemms, *tuned).empty());
    const std::vector<Values> want = run_all(tuned);
    const std::string text = tuned->text();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;
    EXPECT_EQ(run_all(tuned), want);
    const auto read = std::make_shared<GemmAlgorithms>();
    read->load(text, "gemm.txt");
    EXPECT_EQ(run_all(read), want);
    EXPECT_EQ(read->text(), text);
    EXPECT_THROW(set_gemm_algorithms(Stream::inline_cpu("cpu"), read), InvalidArgument);
  } else {
    FAIL() << "built without CUDA";
  }
}

}  // namespace
}  // namespace tessera::engine
