// What a tape notices with MemoryOptions::check_saved: values that were written between forward and
// backward, and regions that give something else when they run again.
#include "engine/saved_values.h"

#include <string>
#include <vector>

#include "tests/engine/tape_testing.h"

namespace tessera::engine {
namespace {

// y = x * x: needs the values of x, as `kept`.
Tensor square(Tape& tape, const Tensor& x, const Tensor& kept) {
  const Tensor y = tape.empty(x.shape(), x.dtype(), "square");
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    y.data<float>()[i] = x.data<float>()[i] * x.data<float>()[i];
  }
  tape.record("square", y, [&tape, x = x.without_data(), kept](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x)) {
      for (std::int64_t i = 0; i < kept.numel(); ++i) {
        dx.dst.data<float>()[i] = 2 * kept.data<float>()[i] * dy.data<float>()[i];
      }
    }
  });
  return y;
}

class SavedValuesTest : public ::testing::Test {
 protected:
  Tensor input(const std::string& name) const {
    return Tensor::from<float>(memory_, {1}, std::vector<float>{3}, name);
  }
  static void write(const Tensor& x) { x.data<float>()[0] = 5; }

  const Stream compute_ = Stream::inline_cpu("compute");
  Memory memory_{{.check_saved = true}};
  Tape tape_{memory_, compute_};
  const Block block_{"h.0", {}, nullptr};
};

TEST_F(SavedValuesTest, AWriteBetweenForwardAndBackwardIsNamed) {
  const Tensor x = input("x"), other = input("other");
  tape_.watch(x);
  const auto forward = [&] { return scale(tape_, square(tape_, x, x), 2); };
  Tensor y = forward();
  write(other);  // which nobody saved
  tape_.backward(y);
  EXPECT_EQ(tape_.grad(x).item(), 12);
  y = forward();
  write(x);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tape_.backward(y); }),
                  {"[tape]", "'x' as op 'square' saved it in forward", "got other values"}));
  EXPECT_EQ(tape_.num_entries(), 0u);
}

// Of a view all of the memory counts, of a tensor without data nothing.
TEST_F(SavedValuesTest, OnlyWhatAnOpKeepsIsLookedAt) {
  const Tensor data = Tensor::from<float>(memory_, {2}, std::vector<float>{3, 4}, "data");
  const Tensor x = input("x");
  tape_.watch(x);
  Tensor y = square(tape_, x, data.slice(1, {1}));
  write(x);
  tape_.backward(y);
  EXPECT_EQ(tape_.grad(x).item(), 8);
  y = square(tape_, x, data.slice(1, {1}));
  write(data);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { tape_.backward(y); }), {"'data' as op 'square'"}));
}

TEST_F(SavedValuesTest, AnInputOfARecomputedRegionIsSavedToo) {
  const Tensor x = input("x");
  tape_.watch(x);
  const Tensor y = tape_.region(
      block_, {.recompute = true}, [&](const Tensor& h) { return square(tape_, h, h); }, x);
  write(x);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { tape_.backward(y); }), {"'x' as region 'h.0' saved it"}));
}

TEST_F(SavedValuesTest, ARegionThatIsAnotherWhenItRunsAgainIsNamed) {
  const Tensor x = input("x");
  tape_.watch(x);
  float a = 2;
  const auto forward = [&] {
    return tape_.region(
        block_, {.recompute = true}, [&](const Tensor& h) { return scale(tape_, h, a); }, x);
  };
  tape_.backward(forward());
  EXPECT_EQ(tape_.grad(x).item(), 2);
  const Tensor y = forward();
  a = 4;
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { tape_.backward(y); }),
          {"[region]", "output 0 as it was when h.0 is recomputed", "other values", "(scale)"}));
}

// Memory of parameters is written as units are gathered and resharded, and inputs after a backward.
TEST_F(SavedValuesTest, WhatIsMeantToBeWrittenMayBe) {
  Parameter w{.name = "w", .shape = {1}, .init = Init::ones()};
  materialize({&w}, memory_, 1);
  const Tensor x = input("x");
  tape_.watch(x);
  for (int step = 0; step < 3; ++step) {
    const Tensor y = square(tape_, x, w.value);
    write(w.value);
    tape_.backward(y);
    EXPECT_EQ(tape_.grad(x).item(), 10);
    write(x);
  }
}

TEST_F(SavedValuesTest, WithoutItNothingIsRead) {
  const Memory memory;
  Tape tape(memory, compute_);
  const Tensor x = Tensor::from<float>(memory, {1}, std::vector<float>{3}, "x");
  EXPECT_EQ(memory.live_buffers(), nullptr);
  tape.watch(x);
  const Tensor y = square(tape, x, x);
  write(x);
  tape.backward(y);
  EXPECT_EQ(tape.grad(x).item(), 10) << "which is wrong, and why there is a check";
}

}  // namespace
}  // namespace tessera::engine
