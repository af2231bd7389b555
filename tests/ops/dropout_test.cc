// Dropout: the mask is that of RandomStream for every index, scale, gradients, refusals.
#include "ops/dropout.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::RandomStream;
using engine::Shape;
using engine::Tape;
using engine::Tensor;
using testing::check_bf16;
using testing::check_gradients;
using testing::OpCase;
using testing::OpRun;
using testing::run_op;
using testing::Values;

constexpr RandomStream kRandom{0x123456789ABCDEFull, 0xFEDCBA9876543210ull};

OpCase dropout_case(Shape shape, float p, std::uint64_t first_index) {
  return {.inputs = {shape},
          .build = [=](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>&) {
            return dropout(tape, x[0], p, kRandom, first_index);
          }};
}

TEST(Dropout, TheMaskIsTheStreamsForAnyFirstIndexAndLength) {
  const float border = kRandom.uniform(1023);  // kept exactly at p, dropped just above
  for (const float p : {1e-9f, 0.1f, border, std::nextafter(border, 1.0f), 0.9f, 1 - 0x1p-24f})
    for (const std::uint64_t first :
         {0ull, 1ull, 2ull, 3ull, 4ull, 1021ull, 0x3FFFFFF81ull, 0x1000000000001ull})
      for (const std::int64_t n : {1, 3, 4, 31, 255, 256, 257, 1025}) {
        const OpRun run = run_op(dropout_case({n}, p, first));
        const double scale = 1 / (1 - p);
        for (std::size_t i = 0; i < run.y.size(); ++i) {
          const bool kept = kRandom.uniform(first + i) >= p;
          ASSERT_EQ(run.y[i], kept ? static_cast<float>(run.leaves[0][i] * scale) : 0)
              << p << " " << first << " " << i << " of " << n;
          ASSERT_EQ(run.grads[0][i], kept ? static_cast<float>(run.dy[i] * scale) : 0);
        }
      }
}

TEST(Dropout, DropsTheFractionItSays) {
  const OpRun run = run_op(dropout_case({20000}, 0.3f, 5));
  EXPECT_NEAR(std::count(run.y.begin(), run.y.end(), 0.0) / 20000.0, 0.3, 0.02);
}

TEST(Dropout, GradientsWhenSharedOrOfData) {
  check_gradients(dropout_case({5, 205}, 0.5f, 7));
  check_gradients(dropout_case({3}, 0.1f, 2));
  check_bf16(dropout_case({5, 205}, 0.5f, 7));
}

TEST(Dropout, ZeroProbabilityIsTheInputItself) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor x = Tensor::zeros(memory, {3}, DType::kF32);
  EXPECT_EQ(dropout(tape, x, 0, kRandom, 0).key(), x.key());
  EXPECT_EQ(tape.num_entries(), 0u);
}

TEST(Dropout, RefusesProbabilitiesOutsideTheRange) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor x = Tensor::zeros(memory, {3}, DType::kF32);
  for (const float p : {-0.1f, 1.0f, 2.0f, NAN})
    EXPECT_THROW(dropout(tape, x, p, kRandom, 0), InvalidArgument) << p;
  EXPECT_THROW(dropout(tape, Tensor::zeros(memory, {3}, DType::kI32), 0.5f, kRandom, 0),
               InvalidArgument);
  const Tensor count = Tensor::zeros(memory, {1}, DType::kI64);
  EXPECT_THROW(dropout(tape, x, 0.5f, kRandom, 0, {.count = count}), InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops
