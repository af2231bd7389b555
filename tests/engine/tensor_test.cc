// Shapes, tensors and buffers: values, views, identity, and refusals that name what they refuse.
#include "engine/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "engine/elementwise.h"
#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

using tessera::testing::error_of;
using tessera::testing::has;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

TEST(Shape, KnowsItsDimensions) {
  const Shape shape{2, 3, 5};
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape.numel(), 30);
  EXPECT_EQ(shape.rows(), 6);
  EXPECT_EQ(shape.dim(0), 2);
  EXPECT_EQ(shape.dim(-1), 5);
  EXPECT_EQ(shape.str(), "(2, 3, 5)");
  EXPECT_EQ(shape.drop_last(), (Shape{2, 3}));
  EXPECT_EQ(shape.with_last(7), (Shape{2, 3, 7}));
  EXPECT_EQ(std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end()),
            (std::vector<std::int64_t>{2, 3, 5}));
  EXPECT_NE(shape, (Shape{2, 15}));
}

TEST(Shape, ScalarHasOneElementAndZeroSizesHaveNone) {
  const Shape scalar;
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_EQ(scalar.rows(), 1);
  EXPECT_EQ(scalar.str(), "()");
  EXPECT_EQ((Shape{3, 0, 4}).numel(), 0);
  EXPECT_EQ((Shape{3, 4, 0}).rows(), 12);
}

TEST(Shape, RefusesWhatCannotBe) {
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1}), InvalidArgument);
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { Shape{2, -3}; }), {"[shape]", "-3"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { (Shape{2, 3}).dim(2); }), {"[shape]", "2"}));
  EXPECT_THROW((Shape{2, 3}).dim(-3), InvalidArgument);
  EXPECT_THROW(Shape().dim(-1), InvalidArgument);
  EXPECT_THROW(Shape().drop_last(), InvalidArgument);
  EXPECT_THROW(Shape().with_last(1), InvalidArgument);
}

TEST(Shape, RefusesSizesWhoseBytesOverflow) {
  EXPECT_THROW((Shape{kMax, 2}), InvalidArgument);
  EXPECT_THROW((Shape{std::int64_t{1} << 32, std::int64_t{1} << 32}), InvalidArgument);
  // Fits as a number of elements, but 8 bytes an element do not.
  EXPECT_THROW((Shape{kMax / 4}), InvalidArgument);
  EXPECT_EQ((Shape{std::int64_t{1} << 40}).numel(), std::int64_t{1} << 40);
}

class TensorTest : public ::testing::Test {
 protected:
  Tensor counting(std::int64_t numel) {
    std::vector<float> values(static_cast<std::size_t>(numel));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    return Tensor::from<float>(memory, {numel}, values, "counting");
  }
  Memory memory;
};

TEST_F(TensorTest, HoldsWhatItWasMadeFrom) {
  const std::vector<std::int64_t> values = {1, -2, 3, kMax, 5, 6};
  const Tensor t = Tensor::from<std::int64_t>(memory, {2, 3}, values, "ids");
  EXPECT_EQ(std::vector<std::int64_t>(t.span<std::int64_t>().begin(), t.span<std::int64_t>().end()),
            values);
  EXPECT_EQ(t.dtype(), DType::kI64);
  EXPECT_EQ(t.nbytes(), 48);
  EXPECT_EQ(t.name(), "ids");
  EXPECT_EQ(t.dim(-1), 3);
  for (const float v : Tensor::zeros(memory, {7}, DType::kF32).span<float>()) EXPECT_EQ(v, 0);
  EXPECT_TRUE(has(
      error_of<InvalidArgument>([&] { Tensor::from<std::int64_t>(memory, {4}, values, "ids"); }),
      {"4", "6", "ids"}));
}

TEST_F(TensorTest, AllocatesSmallElementsByTheirSize) {
  for (const DType dtype : {DType::kU8, DType::kBF16, DType::kI32, DType::kF32, DType::kI64}) {
    const Tensor t = Tensor::empty(memory, {5}, dtype);
    EXPECT_EQ(t.nbytes(), 5 * size_of(dtype)) << name_of(dtype);
    EXPECT_EQ(t.buffer()->nbytes(), t.nbytes()) << name_of(dtype);
  }
}

TEST_F(TensorTest, CopiesAndViewsShareMemory) {
  const Tensor t = counting(12);
  const Tensor copy = t, matrix = t.reshape({3, 4}), row = matrix.slice(4, {4});
  EXPECT_EQ(matrix.shape(), (Shape{3, 4}));
  EXPECT_EQ(row.data<float>(), t.data<float>() + 4);
  row.data<float>()[1] = -1;
  EXPECT_EQ(copy.data<float>()[5], -1);
  EXPECT_EQ(row.slice(3, Shape{}).item(), 7);
  EXPECT_EQ(memory.stats().total_nbytes, 48);
}

TEST_F(TensorTest, IdentityIsThatOfTheElements) {
  const Tensor t = counting(12);
  const Tensor copy = t;
  EXPECT_EQ(t.key(), copy.key());
  EXPECT_EQ(t.key(), t.reshape({3, 4}).key());
  EXPECT_EQ(t.key(), t.slice(0, {2, 6}).key());
  EXPECT_EQ(t.slice(4, {4}).key(), t.reshape({3, 4}).slice(4, {2, 2}).key());
  EXPECT_NE(t.key(), t.slice(0, {11}).key());
  EXPECT_NE(t.slice(0, {4}).key(), t.slice(4, {4}).key());
  EXPECT_NE(t.key(), counting(12).key());
  EXPECT_EQ(TensorKeyHash()(t.key()), TensorKeyHash()(t.reshape({3, 4}).key()));
}

TEST_F(TensorTest, ViewsOutOfRangeAreRefused) {
  const Tensor t = counting(12);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { t.reshape({5}); }),
                  {"[reshape]", "12", "(5)", "counting"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { t.slice(9, {4}); }),
                  {"[slice]", "9", "4", "12", "counting"}));
  EXPECT_THROW(t.slice(-1, {1}), InvalidArgument);
  EXPECT_THROW(t.slice(13, {0}), InvalidArgument);
  EXPECT_THROW(t.slice(kMax, {1}), InvalidArgument);
  EXPECT_EQ(t.slice(12, {0}).numel(), 0);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { Tensor(t.buffer(), 8, {11}, DType::kF32); }),
                  {"[tensor]", "44", "8", "48", "counting"}));
  EXPECT_THROW(Tensor(t.buffer(), -4, {1}, DType::kF32), InvalidArgument);
  EXPECT_THROW(Tensor(t.buffer(), kMax, {1}, DType::kF32), InvalidArgument);
}

TEST_F(TensorTest, WrongDtypeIsRefusedWithBothNames) {
  const Tensor t = counting(2);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { t.data<BFloat16>(); }), {"bf16", "f32", "counting"}));
  EXPECT_THROW(t.span<std::int32_t>(), InvalidArgument);
}

TEST_F(TensorTest, UndefinedIsRefused) {
  const Tensor t;
  EXPECT_FALSE(t.defined());
  EXPECT_EQ(t.name(), "undefined tensor");
  EXPECT_THROW(t.key(), InvalidArgument);
  EXPECT_THROW(t.raw(), InvalidArgument);
  EXPECT_THROW(t.data<float>(), InvalidArgument);
}

TEST_F(TensorTest, ItemReadsOneFloat) {
  EXPECT_EQ(Tensor::from<float>(memory, {1, 1}, std::vector<float>{2.5f}).item(), 2.5f);
  const std::vector<BFloat16> one = {BFloat16::from_float(1.5f)};
  EXPECT_EQ(Tensor::from<BFloat16>(memory, {}, one).item(), 1.5f);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { counting(2).item(); }), {"[item]", "(2)"}));
  EXPECT_THROW(Tensor::zeros(memory, {}, DType::kI32).item(), InvalidArgument);
}

TEST_F(TensorTest, ReadingAReleasedBufferThrowsItsName) {
  const Tensor t = counting(4), view = t.slice(1, {2});
  t.buffer()->release();
  EXPECT_FALSE(t.buffer()->resident());
  for (const Tensor& x : {t, view}) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { x.data<float>(); }), {"counting"}));
  }
  EXPECT_EQ(memory.stats().total_nbytes, 0);
  t.buffer()->release();  // idempotent
  t.buffer()->acquire();
  fill_zero(t);
  EXPECT_EQ(view.data<float>()[0], 0);
  EXPECT_EQ(memory.stats().total_nbytes, 16);
  EXPECT_THROW(t.buffer()->acquire(), InvalidArgument);
}

TEST_F(TensorTest, AttachedBuffersLiveInTheirSlot) {
  auto slot = Buffer::create(memory, "slot", 64, Category::kGatheredParameter);
  const auto unit = Buffer::create_released(memory, "unit", 48, Category::kGatheredParameter);
  const Tensor t(unit, 16, {8}, DType::kF32);  // a view may be made while released
  unit->attach(slot);
  EXPECT_EQ(t.raw(), slot->data() + 16);
  EXPECT_EQ(memory.stats().total_nbytes, 64) << "counted once";
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { unit->attach(slot); }), {"unit"}));
  EXPECT_THROW(unit->acquire(), InvalidArgument);
  std::byte* const data = slot->data();
  slot.reset();
  EXPECT_EQ(unit->data(), data) << "the slot is kept alive";
  unit->release();
  EXPECT_EQ(memory.stats().total_nbytes, 0);
  const auto small = Buffer::create(memory, "small", 47, Category::kGatheredParameter);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { unit->attach(small); }), {"48", "47", "unit", "small"}));
  EXPECT_THROW(Buffer::create(memory, "negative", -1, Category::kWorkspace), InvalidArgument);
}

TEST_F(TensorTest, CastAndAddConvertWithOneRounding) {
  const std::vector<float> values = {1, 1.00390625f, -3.3f, 1e-3f};
  const Tensor f = Tensor::from<float>(memory, {4}, values);
  const Tensor b = Tensor::empty(memory, {2, 2}, DType::kBF16);
  cast(b, f);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(b.data<BFloat16>()[i].bits, BFloat16::from_float(values[i]).bits);
  }
  assign_or_add(b, f, true);
  assign_or_add(f, b, true);
  for (std::size_t i = 0; i < 4; ++i) {
    const float rounded = BFloat16::from_float(values[i]).to_float();
    const float sum = BFloat16::from_float(rounded + values[i]).to_float();
    EXPECT_EQ(f.data<float>()[i], values[i] + sum);
  }
  assign_or_add(f, b, false);
  EXPECT_EQ(f.data<float>()[2], b.data<BFloat16>()[2].to_float());
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { cast(counting(3), f); }), {"3", "4"}));
  EXPECT_THROW(cast(f, Tensor::zeros(memory, {4}, DType::kI32)), InvalidArgument);
}

}  // namespace
}  // namespace tessera::engine
