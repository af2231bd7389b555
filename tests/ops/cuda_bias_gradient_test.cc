// Gradients of biases on a GPU: summed by who writes the gradient that they are the sums of.
#include <utility>
#include <vector>

#include "engine/stream.h"
#include "ops/add.h"
#include "ops/gelu.h"
#include "ops/layernorm.h"
#include "ops/linear.h"
#include "ops/relu.h"
#include "ops/rmsnorm.h"
#include "ops/scale.h"
#include "ops/swiglu.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

// Several ops in a row: what differs in the last bit of one, as the tests of each allow, may round
// to another bf16 in the next.
constexpr CudaBounds kBounds{.f32 = 6e-6, .bf16 = 0x1p-7};

using Leaves = std::vector<Tensor>;
using Parameters = std::vector<Parameter>;

// What gradients of biases were summed from, in bytes.
class BiasReads : public engine::LaunchListener {
 public:
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    if (record.work.name == "linear.backward_bias") nbytes_.push_back(record.work.bytes_read);
  }
  const std::vector<std::int64_t>& nbytes() const { return nbytes_; }

 private:
  std::vector<std::int64_t> nbytes_;
};

std::vector<std::int64_t> bias_reads(const OpCase& op, RunOptions options = {}) {
  BiasReads reads;
  options.on_cuda = true;
  options.listener = &reads;
  run_op(op, options);
  return reads.nbytes();
}

// op(x W + b), with x (rows, 5).
template <class Op>
OpCase behind_linear(std::int64_t rows, std::int64_t cols, Op op, int num_linears = 1) {
  OpCase c{.inputs = {{rows, 5}}, .build = [=](Tape& tape, const Leaves& x, Parameters& p) {
             Leaves y;
             for (std::size_t i = 0; i < static_cast<std::size_t>(num_linears); ++i)
               y.push_back(linear(tape, x[0], p[2 * i], &p[2 * i + 1]));
             return op(tape, y);
           }};
  for (int i = 0; i < num_linears; ++i)
    c.parameters.insert(c.parameters.end(), {{5, cols}, {cols}});
  return c;
}

Tensor gelu_of(Tape& tape, const Leaves& y) { return gelu(tape, y[0]); }
Tensor relu_of(Tape& tape, const Leaves& y) { return relu(tape, y[0]); }

// Of a norm whose weight is no parameter of the case.
struct FixedNorm {
  Parameter weight;
  Tensor operator()(Tape& tape, const Tensor& x) {
    prepare(tape, x);
    return layernorm(tape, x, weight, nullptr);
  }
  NormOfSum operator()(Tape& tape, const Tensor& x, const Tensor& h) {
    prepare(tape, x);
    return add_rmsnorm(tape, x, h, weight);
  }

 private:
  void prepare(Tape& tape, const Tensor& x) {
    const std::int64_t cols = x.dim(-1);
    weight.name = "norm", weight.shape = {cols}, weight.trainable = false;
    weight.value = to_tensor(tape.memory(), {cols}, random_values(cols, 77), x.dtype());
  }
};

using Sizes = std::vector<std::pair<std::int64_t, std::int64_t>>;

TEST(CudaBiasGradient, IsThatOfTheCpuAfterActivations) {
  for (const auto& [rows, cols] : Sizes{{1, 1}, {3, 8}, {31, 33}, {130, 7}}) {
    check_cuda(behind_linear(rows, cols, gelu_of), kBounds);
    // In bf16 what is nearly 0 may have the other sign.
    check_cuda_run(behind_linear(rows, cols, relu_of), {.num_uses = 2, .offset = 1}, kBounds);
    check_cuda(behind_linear(
                   rows, cols, [](Tape& t, const Leaves& y) { return swiglu(t, y[0], y[1]); }, 2),
               kBounds);
  }
  check_cuda_run(behind_linear(129, 264, gelu_of), {.dtype = DType::kBF16}, kBounds);
  check_cuda_run(behind_linear(33'000, 1, gelu_of), {}, {.f32 = 2e-5});
}

TEST(CudaBiasGradient, IsThatOfTheCpuAfterNorms) {
  for (const auto& [rows, cols] : Sizes{{1, 2}, {3, 8}, {31, 33}}) {
    FixedNorm norm;
    check_cuda(behind_linear(rows, cols, [&](Tape& t, const Leaves& y) { return norm(t, y[0]); }),
               kBounds);
    const auto with_residual = [&](Tape& t, const Leaves& y) {
      const NormOfSum n = norm(t, y[0], y[1]);
      return add(t, n.sum, n.y);
    };
    check_cuda(behind_linear(rows, cols, with_residual, 2), kBounds);
  }
}

// Whoever does not leave sums, as scale() does not, makes the same gradient of y otherwise. Rows
// that a block of a norm comes back for, and more columns than its threads keep in registers.
TEST(CudaBiasGradient, SumsTheElementsAsTheyAreStored) {
  FixedNorm norm;
  const auto check = [&](std::int64_t rows, std::int64_t cols, int num_uses, const auto& op) {
    const OpCase left = behind_linear(rows, cols, [&](Tape& t, const Leaves& y) {
      return add(t, op(t, y[0]), scale(t, op(t, y[0]), 3));
    });
    const OpCase read = behind_linear(rows, cols, [&](Tape& t, const Leaves& y) {
      const Tensor same = scale(t, y[0], 1);
      return add(t, op(t, same), scale(t, op(t, same), 3));
    });
    const RunOptions options{.dtype = DType::kBF16, .num_uses = num_uses, .on_cuda = true};
    const OpRun a = run_op(left, options), b = run_op(read, options);
    EXPECT_EQ(a.grads[0], b.grads[0]);
    EXPECT_EQ(a.grads[1], b.grads[1]);
    expect_close(a.grads[2], b.grads[2], 4e-6, "bias");
  };
  const auto normed = [&](Tape& t, const Tensor& y) { return norm(t, y); };
  check(200, 33, 2, [](Tape& t, const Tensor& y) { return gelu(t, y); });
  check(200, 33, 2, [](Tape& t, const Tensor& y) { return relu(t, y); });
  check(200, 33, 2, normed);
  check(4100, 2, 1, normed);
  check(3, 4104, 1, normed);
  check(264 + 3, 4104, 1, normed);
}

TEST(CudaBiasGradient, ReadsSumsOfPartsInPlaceOfWhatTheyAreTheSumsOf) {
  const std::int64_t rows = 1025, cols = 40, num_parts = 9, in_parts = num_parts * cols * 4;
  EXPECT_EQ(bias_reads(behind_linear(rows, cols, gelu_of)), std::vector<std::int64_t>({in_parts}));
  EXPECT_EQ(bias_reads(behind_linear(
                rows, cols, [](Tape& t, const Leaves& y) { return swiglu(t, y[0], y[1]); }, 2)),
            std::vector<std::int64_t>({in_parts, in_parts}));
  FixedNorm norm;
  const auto normed = [&](Tape& t, const Leaves& y) {
    const NormOfSum n = norm(t, add(t, y[0], y[1]), y[2]);
    return add(t, n.sum, n.y);
  };
  const std::int64_t norm_parts = 129 * cols * 4;  // blocks of eight rows
  EXPECT_EQ(bias_reads(behind_linear(rows, cols, normed, 3)),
            std::vector<std::int64_t>({norm_parts, norm_parts, norm_parts}));
}

// Where another gradient is added after the sums, all is read; where it came first, the sums are
// those of both.
TEST(CudaBiasGradient, ASecondContributionDropsTheSums) {
  const std::int64_t rows = 300, cols = 40, in_parts = 3 * cols * 4, whole = rows * cols * 4;
  const auto scaled_first = [](Tape& t, const Leaves& y) {
    const Tensor a = scale(t, y[0], 0.7f);
    return add(t, a, gelu(t, y[0]));
  };
  const auto scaled_last = [](Tape& t, const Leaves& y) {
    const Tensor a = gelu(t, y[0]);
    return add(t, a, scale(t, y[0], 0.7f));
  };
  // The gradient of the sum is passed to y, to which the GELU has given its own.
  const auto passed = [](Tape& t, const Leaves& y) {
    const Tensor a = add(t, y[0], y[1]);
    return add(t, a, gelu(t, y[0]));
  };
  // One gradient for both, then more for one of them, which takes a copy.
  const auto shared = [](Tape& t, const Leaves& y) {
    const Tensor a = scale(t, y[0], 0.7f);
    const Tensor b = gelu(t, add(t, y[0], y[1]));
    return add(t, a, b);
  };
  for (const auto& op :
       {behind_linear(rows, cols, scaled_first),  //
        behind_linear(rows, cols, scaled_last), behind_linear(rows, cols, passed, 2),
        behind_linear(rows, cols, shared, 2)})
    check_cuda(op, kBounds);
  using Reads = std::vector<std::int64_t>;
  EXPECT_EQ(bias_reads(behind_linear(rows, cols, scaled_first)), Reads({whole}));
  EXPECT_EQ(bias_reads(behind_linear(rows, cols, scaled_last)), Reads({in_parts}));
  EXPECT_EQ(bias_reads(behind_linear(rows, cols, passed, 2)), Reads({whole, whole}));
  EXPECT_EQ(bias_reads(behind_linear(rows, cols, shared, 2)), Reads({in_parts, whole}));
}

// A view with other columns has other sums.
TEST(CudaBiasGradient, SumsOfOtherColumnsAreNotTaken) {
  const auto op = behind_linear(60, 40, [](Tape& t, const Leaves& y) {
    return gelu(t, y[0].reshape({30, 80}));
  });
  check_cuda(op, kBounds);
  EXPECT_EQ(bias_reads(op), std::vector<std::int64_t>({60 * 40 * 4}));
}

// The sum leaves its region, and who writes its gradient is in the next.
TEST(CudaBiasGradient, HasTheSameBitsInARecomputedRegion) {
  const engine::Block first{"first", {}}, second{"second", {}};
  std::vector<OpRun> runs;
  std::vector<std::vector<std::int64_t>> reads;
  for (const bool recompute : {false, true}) {
    const OpCase op{.inputs = {{300, 40}},
                    .parameters = {{40, 40}, {40}, {40}, {40, 24}, {24}},
                    .build = [&, recompute](Tape& tape, const Leaves& leaves, Parameters& p) {
                      const Tensor x = leaves[0];
                      const Tensor y = tape.region(
                          first,
                          [&tape, &p, x] { return add(tape, x, linear(tape, x, p[0], &p[1])); },
                          {.recompute = recompute});
                      return tape.region(second,
                                         [&tape, &p, y] {
                                           const Tensor h = layernorm(tape, y, p[2], nullptr);
                                           return gelu(tape, linear(tape, h, p[3], &p[4]));
                                         },
                                         {.recompute = recompute});
                    }};
    runs.push_back(check_cuda_run(op, {}, kBounds));
    reads.push_back(bias_reads(op));
  }
  EXPECT_EQ(runs[0].grads, runs[1].grads);
  EXPECT_EQ(reads[0], reads[1]);
  EXPECT_EQ(reads[0], std::vector<std::int64_t>({3 * 24 * 4, 38 * 40 * 4}));
}

}  // namespace
}  // namespace tessera::ops
