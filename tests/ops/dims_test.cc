// Slices, concatenations, permutations, broadcasts, and reductions over one dimension: against
// indices written out, gradients, sharing, bf16, what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "ops/add.h"
#include "ops/dims/broadcast.h"
#include "ops/dims/permute.h"
#include "ops/dims/reduce.h"
#include "ops/dims/slice.h"
#include "ops/elementwise/div.h"
#include "ops/linear.h"
#include "ops/mul.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;

using Build = std::function<Tensor(Tape&, const Tensor&)>;

OpCase case_of(Shape shape, const Build& op) {
  return {.inputs = {shape},
          .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0]); }};
}

// x as (a, b, c), all other dimensions merged around `dim`.
struct Three {
  const Values* values;
  std::int64_t b, c;

  double at(std::int64_t i, std::int64_t j, std::int64_t k) const {
    return (*values)[static_cast<std::size_t>((i * b + j) * c + k)];
  }
};

TEST(Slice, IsThePartAndItsGradient) {
  const OpCase op =
      case_of({3, 5, 4}, [](Tape& t, const Tensor& x) { return slice(t, x, -2, 1, 3); });
  const OpRun run = run_op(op);
  const Three x{&run.leaves[0], 5, 4}, y{&run.y, 3, 4}, dx{&run.grads[0], 5, 4}, dy{&run.dy, 3, 4};
  for (std::int64_t i = 0; i < 3; ++i)
    for (std::int64_t j = 0; j < 5; ++j)
      for (std::int64_t k = 0; k < 4; ++k) {
        const bool inside = j >= 1 && j < 4;
        if (inside) {
          EXPECT_EQ(y.at(i, j - 1, k), x.at(i, j, k));
        }
        EXPECT_EQ(dx.at(i, j, k), inside ? dy.at(i, j - 1, k) : 0);
      }
  for (const int dim : {0, 1, 2, -1}) {
    const OpCase any = case_of({3, 3, 3}, [dim](Tape& t, const Tensor& v) {
      return add(t, slice(t, v, dim, 0, 2), slice(t, v, dim, 1, 2));  // they overlap
    });
    check_gradients(any);
    check_bf16(any);
  }
  EXPECT_EQ(run_op(case_of({2, 3}, [](Tape& t, const Tensor& v) { return slice(t, v, 1, 3, 0); }))
                .grads[0],
            Values(6, 0));
}

TEST(Split, PartsAreSlices) {
  // Of three parts the middle one has no gradient, and the last is used twice.
  const Build by_split = [](Tape& t, const Tensor& x) {
    const std::vector<Tensor> parts = split(t, x, 1, {2, 3, 2});
    return mul(t, parts[0], add(t, parts[2], parts[2]));
  };
  const Build by_slices = [](Tape& t, const Tensor& x) {
    const Tensor last = slice(t, x, 1, 5, 2);
    return mul(t, slice(t, x, 1, 0, 2), add(t, last, last));
  };
  for (const int num_uses : {1, 2}) {
    const OpRun a = run_op(case_of({3, 7}, by_split), {.num_uses = num_uses});
    const OpRun b = run_op(case_of({3, 7}, by_slices), {.num_uses = num_uses});
    EXPECT_EQ(a.y, b.y);
    EXPECT_EQ(a.grads, b.grads);
  }
  check_gradients(case_of({3, 7}, by_split));
  check_bf16(case_of({3, 7}, by_split));
}

TEST(Concat, IsTheInverseOfSplit) {
  for (const int dim : {0, 1, 2}) {
    const OpCase op = case_of({4, 4, 4}, [dim](Tape& t, const Tensor& x) {
      std::vector<Tensor> parts = split(t, x, dim, {1, 0, 3});
      return concat(t, parts, dim - 3);
    });
    const OpRun run = run_op(op);
    EXPECT_EQ(run.y, run.leaves[0]);
    EXPECT_EQ(run.grads[0], run.dy);
  }
  const OpCase two{.inputs = {{2, 3}, {2, 5}}, .build = [](Tape& t, const auto& x, auto&) {
                     return concat(t, {x[0], x[1], x[0]}, 1);
                   }};
  const OpRun run = run_op(two);
  EXPECT_EQ(run.y[0 * 11 + 3], run.leaves[1][0]);
  EXPECT_EQ(run.y[1 * 11 + 8], run.leaves[0][3]);
  EXPECT_EQ(run.grads[0][3], static_cast<float>(run.dy[11] + run.dy[11 + 8]));
  check_gradients(two);
  check_bf16(two);
}

TEST(Permute, MovesEachElement) {
  const OpCase op = case_of({2, 3, 4, 5}, [](Tape& t, const Tensor& x) {
    return permute(t, x, {2, 0, -1, 1});
  });
  const OpRun run = run_op(op);
  std::size_t i = 0;
  for (std::int64_t a = 0; a < 4; ++a)
    for (std::int64_t b = 0; b < 2; ++b)
      for (std::int64_t c = 0; c < 5; ++c)
        for (std::int64_t d = 0; d < 3; ++d, ++i) {
          const auto from = static_cast<std::size_t>(((b * 3 + d) * 4 + a) * 5 + c);
          ASSERT_EQ(run.y[i], run.leaves[0][from]);
          ASSERT_EQ(run.grads[0][from], run.dy[i]);
        }
  check_gradients(op);
  check_bf16(op);
  const OpRun same = run_op(case_of({3, 4}, [](Tape& t, const Tensor& x) {
    return permute(t, x, {0, 1});
  }));
  EXPECT_EQ(same.y, same.leaves[0]);
  const OpRun twice = run_op(case_of({3, 4, 5}, [](Tape& t, const Tensor& x) {
    return transpose(t, transpose(t, x, 0, -1), 2, 0);
  }));
  EXPECT_EQ(twice.y, twice.leaves[0]);
  EXPECT_EQ(twice.grads[0], twice.dy);
}

TEST(Broadcast, RepeatsAndSums) {
  const Shape shape{3, 4, 70, 5};  // more columns than a block has
  for (const Shape& x : {Shape{}, Shape{1}, Shape{5}, Shape{70, 1}, Shape{4, 1, 5}, Shape{1, 70, 5},
                         Shape{3, 1, 70, 1}, Shape{1, 4, 1, 5}, Shape{3, 1, 1, 5}, shape}) {
    SCOPED_TRACE(x.str());
    const OpRun run =
        run_op(case_of(x, [&](Tape& t, const Tensor& v) { return broadcast(t, v, shape); }));
    Values sums(static_cast<std::size_t>(x.numel()), 0);
    ASSERT_EQ(run.y.size(), static_cast<std::size_t>(shape.numel()));
    for (std::int64_t i = 0; i < shape.numel(); ++i) {
      std::int64_t rest = i, from = 0, stride = 1;
      for (int k = 1; k <= x.rank(); ++k) {
        if (x.dim(-k) != 1) from += rest % shape.dim(-k) * stride;
        stride *= x.dim(-k);
        rest /= shape.dim(-k);
      }
      ASSERT_EQ(run.y[static_cast<std::size_t>(i)], run.leaves[0][static_cast<std::size_t>(from)]);
      sums[static_cast<std::size_t>(from)] += run.dy[static_cast<std::size_t>(i)];
    }
    for (std::size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(run.grads[0][i], sums[i], 1e-4);
  }
  for (const Shape& x : {Shape{}, Shape{4}, Shape{3, 1}, Shape{2, 1, 4}, Shape{2, 3, 4}}) {
    const OpCase op = case_of(x, [](Tape& t, const Tensor& v) {
      return broadcast(t, v, {2, 3, 4});
    });
    check_gradients(op);
    check_bf16(op);
  }
}

TEST(Reduce, SumsAndMeansAreThoseOfDouble) {
  for (const std::int64_t n : {1, 2, 31, 32, 33, 1000}) {
    for (const std::int64_t inner : {1, 3, 65}) {
      SCOPED_TRACE(std::to_string(n) + " of " + std::to_string(inner));
      const Shape shape{2, n, inner};
      const OpRun run =
          run_op(case_of(shape, [](Tape& t, const Tensor& x) { return sum(t, x, 1); }));
      const OpRun means =
          run_op(case_of(shape, [](Tape& t, const Tensor& x) { return mean(t, x, -2); }));
      const Three x{&run.leaves[0], n, inner}, dx{&run.grads[0], n, inner};
      const Three dmean{&means.grads[0], n, inner};
      const auto divisor = static_cast<float>(n);
      for (std::int64_t i = 0; i < 2; ++i)
        for (std::int64_t k = 0; k < inner; ++k) {
          const auto at = static_cast<std::size_t>(i * inner + k);
          double total = 0, absolute = 0;
          for (std::int64_t j = 0; j < n; ++j) {
            total += x.at(i, j, k);
            absolute += std::abs(x.at(i, j, k));
            ASSERT_EQ(dx.at(i, j, k), run.dy[at]);
            ASSERT_EQ(dmean.at(i, j, k), static_cast<float>(means.dy[at]) / divisor);
          }
          ASSERT_NEAR(run.y[at], total, 3e-6 * absolute);
          ASSERT_EQ(means.y[at], static_cast<float>(run.y[at]) / divisor);
        }
    }
  }
}

// The order that reduce.h promises; and each column has the bits that it has alone.
TEST(Reduce, SumsAreThoseOfLanes) {
  const std::int64_t n = 101;
  const OpRun run = run_op(case_of({n, 7}, [](Tape& t, const Tensor& x) { return sum(t, x, 0); }));
  const OpRun turned = run_op(
      case_of({n, 7}, [](Tape& t, const Tensor& x) { return sum(t, transpose(t, x, 0, 1), 1); }));
  EXPECT_EQ(run.y, turned.y);
  EXPECT_EQ(run.grads, turned.grads);
  for (std::size_t k = 0; k < 7; ++k) {
    std::vector<float> lanes(32, 0);
    for (std::size_t j = 0; j < 101; ++j)
      lanes[j % 32] += static_cast<float>(run.leaves[0][j * 7 + k]);
    for (std::size_t half = 16; half > 0; half /= 2)
      for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    EXPECT_EQ(run.y[k], lanes[0]);
  }
}

TEST(Reduce, GradientsWhenSharedOrOfData) {
  for (const int dim : {0, 1, 2}) {
    for (const auto op : {static_cast<Tensor (*)(Tape&, const Tensor&, int)>(sum), mean}) {
      const OpCase one =
          case_of({3, 4, 5}, [=](Tape& t, const Tensor& x) { return op(t, x, dim); });
      check_gradients(one);
      check_bf16(one);
    }
    const OpCase largest =
        case_of({3, 4, 5}, [=](Tape& t, const Tensor& x) { return max(t, x, dim).y; });
    check_gradients(largest);
    check_bf16(largest);
  }
}

TEST(Reduce, MaxIsTheFirstOfTheLargest) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const auto of = [&](const std::vector<float>& x) {
    return max(tape, Tensor::from<float>(memory, {static_cast<std::int64_t>(x.size())}, x), 0);
  };
  const auto index = [&](const std::vector<float>& x) {
    return engine::to_vector<int>(of(x).index)[0];
  };
  EXPECT_EQ(index({1, 3, 3, 2}), 1);
  EXPECT_EQ(of({1, 3, 3, 2}).y.item(), 3);
  EXPECT_EQ(index({-INFINITY, -INFINITY}), 0);
  EXPECT_EQ(index({1, NAN, 9, NAN}), 1);
  EXPECT_TRUE(std::isnan(of({1, NAN, 9}).y.item()));
  EXPECT_EQ(index({7}), 0);
  // Of two equal ones in a column, the first has all of the gradient.
  OpCase op = case_of({4, 3}, [](Tape& t, const Tensor& x) { return max(t, x, 0).y; });
  op.transform = [](float) { return 1.0f; };
  const OpRun run = run_op(op);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(run.grads[0][i], i < 3 ? run.dy[i] : 0);
}

// What docs/ops.md shows.

TEST(Dims, AMeanOverTheTokensThatAMaskLeaves) {
  const OpCase op{.inputs = {{2, 4, 3}}, .build = [](Tape& tape, const auto& xs, auto&) {
                    const Tensor& x = xs[0];
                    const Tensor mask = Tensor::from<float>(
                        tape.memory(), {2, 4}, std::vector<float>{1, 0, 1, 1, 0, 1, 0, 0});
                    const Tensor mask_of_all = broadcast(tape, mask.reshape({2, 4, 1}), x.shape());
                    const Tensor sums = sum(tape, mul(tape, x, mask_of_all), 1);
                    const Tensor counts = sum(tape, mask, 1);
                    return div(tape, sums, broadcast(tape, counts.reshape({2, 1}), sums.shape()));
                  }};
  const OpRun run = run_op(op);
  const Three x{&run.leaves[0], 4, 3}, y{&run.y, 1, 3};
  for (std::int64_t c = 0; c < 3; ++c) {
    EXPECT_NEAR(y.at(0, 0, c), (x.at(0, 0, c) + x.at(0, 2, c) + x.at(0, 3, c)) / 3, 1e-6);
    EXPECT_NEAR(y.at(1, 0, c), x.at(1, 1, c), 1e-6);
  }
  check_gradients(op);
}

// (B, C, h p, w p) -> (B, h w, C p p).
Tensor patches_of(Tape& tape, const Tensor& image, std::int64_t p) {
  const std::int64_t B = image.dim(0), C = image.dim(1), h = image.dim(2) / p, w = image.dim(3) / p;
  Tensor x = permute(tape, image.reshape({B * C, h, p, w, p}), {0, 1, 3, 2, 4});
  x = permute(tape, x.reshape({B, C, h * w, p * p}), {0, 2, 1, 3});
  return x.reshape({B, h * w, C * p * p});
}

TEST(Dims, PatchesOfImages) {
  const std::int64_t B = 2, C = 3, h = 2, w = 4, p = 5;
  const OpRun run = run_op(case_of({B, C, h * p, w * p}, [=](Tape& tape, const Tensor& image) {
    return patches_of(tape, image, p);
  }));
  std::size_t i = 0;  // of (b, patch down, patch across, channel, y, x)
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t patch = 0; patch < h * w; ++patch)
      for (std::int64_t c = 0; c < C; ++c)
        for (std::int64_t k = 0; k < p * p; ++k, ++i) {
          const std::int64_t y = patch / w * p + k / p, x = patch % w * p + k % p;
          const auto from = static_cast<std::size_t>(((b * C + c) * h * p + y) * w * p + x);
          ASSERT_EQ(run.y[i], run.leaves[0][from]);
          ASSERT_EQ(run.grads[0][from], run.dy[i]);
        }
}

// One whose kernel and stride are p.
TEST(Dims, AProductOfPatchesIsAConvolution) {
  const std::int64_t B = 2, C = 3, h = 2, w = 4, p = 3, O = 5, H = h * p, W = w * p;
  const OpCase op{.inputs = {{B, C, H, W}},
                  .parameters = {{C * p * p, O}},
                  .build = [=](Tape& tape, const auto& x, auto& weights) {
                    return linear(tape, patches_of(tape, x[0], p), weights[0], nullptr);
                  }};
  const OpRun run = run_op(op);
  const Values &image = run.leaves[0], &weights = run.leaves[1];
  Values y(run.y.size(), 0), dimage(image.size(), 0), dweights(weights.size(), 0);
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t o = 0; o < O; ++o)
      for (std::int64_t down = 0; down < h; ++down)
        for (std::int64_t across = 0; across < w; ++across)
          for (std::int64_t c = 0; c < C; ++c)
            for (std::int64_t i = 0; i < p; ++i)
              for (std::int64_t j = 0; j < p; ++j) {
                const auto out = static_cast<std::size_t>(((b * h + down) * w + across) * O + o);
                const auto in =
                    static_cast<std::size_t>(((b * C + c) * H + down * p + i) * W + across * p + j);
                const auto k = static_cast<std::size_t>(((c * p + i) * p + j) * O + o);
                y[out] += image[in] * weights[k];
                dimage[in] += run.dy[out] * weights[k];
                dweights[k] += run.dy[out] * image[in];
              }
  expect_close(run.y, y, 3e-6, "y");
  expect_close(run.grads[0], dimage, 3e-6, "gradient of the image");
  expect_close(run.grads[1], dweights, 3e-6, "gradient of the weights");
  check_gradients(op);
  check_bf16(op);
}

TEST(Dims, RefuseWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor a = Tensor::zeros(memory, {2, 3}, DType::kF32);
  const Tensor tall = Tensor::zeros(memory, {3, 3}, DType::kF32);
  const Tensor half = Tensor::zeros(memory, {2, 3}, DType::kBF16);
  const Tensor integers = Tensor::zeros(memory, {2, 3}, DType::kI32);
  const Tensor none = Tensor::zeros(memory, {2, 0}, DType::kF32);
  constexpr auto kFar = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(slice(tape, a, 2, 0, 1), InvalidArgument);
  EXPECT_THROW(slice(tape, a, -3, 0, 1), InvalidArgument);
  EXPECT_THROW(slice(tape, a, 1, 2, 2), InvalidArgument);
  EXPECT_THROW(slice(tape, a, 1, -1, 1), InvalidArgument);
  EXPECT_THROW(slice(tape, a, 1, 1, -1), InvalidArgument);
  EXPECT_THROW(slice(tape, a, 1, kFar, 1), InvalidArgument);
  EXPECT_THROW(slice(tape, integers, 1, 0, 1), InvalidArgument);
  EXPECT_THROW(split(tape, a, 1, {1, 1}), InvalidArgument);
  EXPECT_THROW(split(tape, a, 1, {4, -1}), InvalidArgument);
  EXPECT_THROW(split(tape, integers, 1, {3}), InvalidArgument);
  EXPECT_THROW(concat(tape, {}, 0), InvalidArgument);
  EXPECT_THROW(concat(tape, {a, tall}, 1), InvalidArgument);
  EXPECT_THROW(concat(tape, {a, half}, 0), InvalidArgument);
  EXPECT_THROW(concat(tape, {integers}, 0), InvalidArgument);
  EXPECT_EQ(concat(tape, {a, tall}, 0).shape(), (Shape{5, 3}));
  for (const std::vector<int>& dims : {std::vector<int>{0}, {0, 0}, {0, 2}, {0, -2}, {1, 0, 1}, {}})
    EXPECT_THROW(permute(tape, a, dims), InvalidArgument);
  EXPECT_THROW(permute(tape, integers, {1, 0}), InvalidArgument);
  EXPECT_THROW(transpose(tape, a, 0, 2), InvalidArgument);
  for (const Shape& shape : {Shape{3}, Shape{2, 1}, Shape{3, 3}, Shape{3, 2}})
    EXPECT_THROW(broadcast(tape, a, shape), InvalidArgument);
  EXPECT_THROW(broadcast(tape, integers, {2, 3}), InvalidArgument);
  EXPECT_THROW(sum(tape, a, 2), InvalidArgument);
  EXPECT_THROW(mean(tape, integers, 0), InvalidArgument);
  EXPECT_THROW(max(tape, integers, 0), InvalidArgument);
  EXPECT_THROW(max(tape, none, 1), InvalidArgument);
  EXPECT_EQ(to_values(sum(tape, none, 1)), (Values{0, 0}));
  EXPECT_TRUE(std::isnan(to_values(mean(tape, none, 1))[0]));
}

// f32; the second time a gradient is added to that of the first.
TEST(Dims, StateTheirWork) {
  for (const int num_uses : {1, 2}) {
    const std::int64_t added = num_uses - 1;
    const auto more = static_cast<double>(added);
    LastWorks works;
    const auto run = [&](const Build& op) {
      run_op(case_of({2, 6}, op), {.num_uses = num_uses, .listener = &works});
    };
    run([](Tape& t, const Tensor& x) { return slice(t, x, 1, 0, 2); });
    works.expect("slice.forward", 0, 16, 16);
    works.expect("slice.backward", 4 * more, 16 * num_uses, 16);
    run([](Tape& t, const Tensor& x) { return transpose(t, x, 0, 1); });
    works.expect("permute.forward", 0, 48, 48);
    works.expect("permute.backward", 12 * more, 48 * num_uses, 48);
    run([](Tape& t, const Tensor& x) { return broadcast(t, x.reshape({2, 1, 6}), {2, 3, 6}); });
    works.expect("broadcast.forward", 0, 144, 144);
    works.expect("broadcast.backward", 36 + 12 * more, 144 + 48 * added, 48);
    run([](Tape& t, const Tensor& x) { return mean(t, x, 0); });
    works.expect("mean.forward", 12 + 6, 48, 24);
    works.expect("mean.backward", 12 + 12 * more, 48 * num_uses, 48);
    run([](Tape& t, const Tensor& x) { return max(t, x, 0).y; });
    works.expect("max.forward", 12, 48, 48);
    works.expect("max.backward", 6 * more, 48 + 48 * added, 48);
  }
}

}  // namespace
}  // namespace tessera::ops
