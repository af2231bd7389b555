// Products of matrices of a batch, and of their transposes, against double.
#include "ops/bmm.h"

#include "tests/testing/errors.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Stream;

struct Sizes {
  std::int64_t batch, m, n, k;
};

constexpr BmmOptions kAll[] = {{}, {true, false}, {false, true}, {true, true}};

OpCase bmm_case(const Sizes& s, const BmmOptions& options) {
  const Shape a = options.transpose_a ? Shape{s.batch, s.k, s.m} : Shape{s.batch, s.m, s.k};
  const Shape b = options.transpose_b ? Shape{s.batch, s.n, s.k} : Shape{s.batch, s.k, s.n};
  return {.inputs = {a, b}, .build = [=](Tape& tape, const auto& x, auto&) {
            return bmm(tape, x[0], x[1], options);
          }};
}

struct Naive {
  Naive(const OpRun& run, const Sizes& s, const BmmOptions& options)
      : y(run.y.size()), da(run.leaves[0].size()), db(run.leaves[1].size()) {
    for (std::int64_t i = 0; i < s.batch; ++i) {
      for (std::int64_t m = 0; m < s.m; ++m) {
        for (std::int64_t n = 0; n < s.n; ++n) {
          const auto c = static_cast<std::size_t>((i * s.m + m) * s.n + n);
          for (std::int64_t k = 0; k < s.k; ++k) {
            const auto in_a = static_cast<std::size_t>(
                i * s.m * s.k + (options.transpose_a ? k * s.m + m : m * s.k + k));
            const auto in_b = static_cast<std::size_t>(
                i * s.n * s.k + (options.transpose_b ? n * s.k + k : k * s.n + n));
            y[c] += run.leaves[0][in_a] * run.leaves[1][in_b];
            da[in_a] += run.dy[c] * run.leaves[1][in_b];
            db[in_b] += run.dy[c] * run.leaves[0][in_a];
          }
        }
      }
    }
  }
  Values y, da, db;
};

const Sizes kSizes[] = {
    {1, 1, 1, 1}, {3, 2, 5, 4}, {2, 31, 33, 17}, {5, 1, 13, 3}, {2, 64, 48, 80}};

TEST(Bmm, EqualsItsFormulaInDouble) {
  for (const BmmOptions& options : kAll) {
    for (const Sizes& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} x ({}, {}, {}), {} {}", s.batch, s.m, s.n, s.k,
                               options.transpose_a, options.transpose_b));
      const OpRun run = run_op(bmm_case(s, options));
      const Naive want(run, s, options);
      expect_close(run.y, want.y, 2e-6, "y");
      expect_close(run.grads[0], want.da, 2e-6, "da");
      expect_close(run.grads[1], want.db, 2e-6, "db");
    }
  }
}

TEST(Bmm, GradientsWhenSharedOrOfData) {
  for (const BmmOptions& options : kAll) check_gradients(bmm_case({3, 2, 5, 4}, options));
}

TEST(Bmm, Bf16IsOneRoundingFromF32) {
  for (const BmmOptions& options : kAll) check_bf16(bmm_case({2, 9, 33, 17}, options));
}

// x x^T: its gradient is (dy + dy^T) x.
TEST(Bmm, BothSidesMayBeTheSame) {
  check_gradients({.inputs = {{2, 3, 4}}, .build = [](Tape& tape, const auto& x, auto&) {
                     return bmm(tape, x[0], x[0], {.transpose_b = true});
                   }});
}

TEST(Bmm, SameBitsTwice) {
  const OpRun one = run_op(bmm_case({2, 31, 33, 17}, {})),
              other = run_op(bmm_case({2, 31, 33, 17}, {}));
  EXPECT_EQ(one.y, other.y);
  EXPECT_EQ(one.grads, other.grads);
}

TEST(Bmm, OfNothingIsZeroOrNothing) {
  EXPECT_EQ(run_op(bmm_case({2, 3, 2, 0}, {})).y, Values(12, 0));
  EXPECT_EQ(run_op(bmm_case({0, 3, 2, 4}, {})).y, Values());
}

// Of 3 x (2, 4) by (4, 5), f32; the second time gradients are added to those of the first.
TEST(Bmm, StatesItsWork) {
  for (const int num_uses : {1, 2}) {
    const std::int64_t added = num_uses - 1;
    LastWorks works;
    run_op(bmm_case({3, 2, 5, 4}, {.transpose_b = true}),
           {.num_uses = num_uses, .listener = &works});
    works.expect("bmm.forward", 240, 96 + 240, 120);
    works.expect("bmm.backward_a", 240, 120 + 240 + 96 * added, 96);
    works.expect("bmm.backward_b", 240, 120 + 96 + 240 * added, 240);
  }
}

TEST(Bmm, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const auto error = [&](const Shape& a, const Shape& b, const BmmOptions& options = {},
                         DType a_dtype = DType::kF32, DType b_dtype = DType::kF32) {
    return error_of<InvalidArgument>([&] {
      bmm(tape, Tensor::zeros(memory, a, a_dtype, "a"), Tensor::zeros(memory, b, b_dtype, "b"),
          options);
    });
  };
  EXPECT_TRUE(has(error({2, 3, 4}, {2, 3, 5}),
                  {"[bmm] expected one batch and one inner dimension", "(2, 3, 4) and (2, 3, 5)"}));
  EXPECT_TRUE(has(error({2, 3, 4}, {3, 4, 5}), {"one batch", "(3, 4, 5)"}));
  EXPECT_TRUE(
      has(error({2, 3, 4}, {2, 4, 5}, {.transpose_a = true}), {"(2, 3, 4) transposed and"}));
  EXPECT_TRUE(has(error({2, 3, 4}, {2, 4, 5}, {.transpose_b = true}), {"(2, 4, 5) transposed ("}));
  EXPECT_TRUE(has(error({3, 4}, {2, 4, 5}), {"(B, M, K)", "got (3, 4)"}));
  EXPECT_TRUE(has(error({2, 3, 4}, {2, 4, 5, 1}), {"(B, K, N)", "(2, 4, 5, 1)"}));
  EXPECT_TRUE(has(error({2, 3, 4}, {2, 4, 5}, {}, DType::kF32, DType::kBF16),
                  {"[bmm] expected f32 or bf16, both alike, got f32 and bf16 (a, b)"}));
  EXPECT_TRUE(has(error({2, 3, 4}, {2, 4, 5}, {}, DType::kI32, DType::kI32), {"got i32 and i32"}));
}

}  // namespace
}  // namespace tessera::ops
