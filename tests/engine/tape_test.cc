// The tape: order, accumulation, regions, recompute, use counts, memory during backward.
#include "engine/tape.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/elementwise.h"

namespace tessera::engine {
namespace {

// y = a * x, elementwise: the smallest op with a parameter-free backward.
Tensor scale(Tape& tape, const Tensor& x, float a) {
  const Tensor y = tape.empty(x.shape(), x.dtype(), "scale");
  for (std::int64_t i = 0; i < x.numel(); ++i) y.data<float>()[i] = a * x.data<float>()[i];
  tape.record("scale", y, [&tape, x, a](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x)) {
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        float& d = dx.dst.data<float>()[i];
        d = (dx.accumulate ? d : 0) + a * dy.data<float>()[i];
      }
    }
  });
  return y;
}

// y = x + w.
Tensor add_parameter(Tape& tape, const Tensor& x, Parameter& w) {
  const Tensor value = tape.use(w);
  const Tensor y = tape.empty(x.shape(), x.dtype(), "add_parameter");
  for (std::int64_t i = 0; i < x.numel(); ++i)
    y.data<float>()[i] = x.data<float>()[i] + value.data<float>()[i];
  tape.record("add_parameter", y, [&tape, x, &w](const Tensor& dy) {
    if (const GradTarget dw = tape.grad_target(w)) assign_or_add(dw.dst, dy, dw.accumulate);
    tape.pass_grad(x, dy);
  });
  return y;
}

Tensor add(Tape& tape, const Tensor& a, const Tensor& b) {
  const Tensor y = tape.empty(a.shape(), a.dtype(), "add");
  for (std::int64_t i = 0; i < a.numel(); ++i)
    y.data<float>()[i] = a.data<float>()[i] + b.data<float>()[i];
  tape.record("add", y, [&tape, a, b](const Tensor& dy) {
    tape.pass_grad(a, dy);
    tape.pass_grad(b, dy);
  });
  return y;
}

struct LoggingHooks : RegionHooks {
  std::vector<std::string>* log;
  explicit LoggingHooks(std::vector<std::string>* l) : log(l) {}
  void before_forward(const Block& b, const Stream&, bool) override {
    log->push_back("+f " + b.name);
  }
  void after_forward(const Block& b, const Stream&, bool) override {
    log->push_back("-f " + b.name);
  }
  void before_backward(const Block& b, const Stream&) override { log->push_back("+b " + b.name); }
  void after_backward(const Block& b, const Stream&) override { log->push_back("-b " + b.name); }
};

class TapeTest : public ::testing::Test {
 protected:
  Tensor input(std::vector<float> values) {
    return Tensor::from<float>(memory, {static_cast<std::int64_t>(values.size())}, values, "x");
  }
  Memory memory;
  Tape tape{memory, Stream::inline_cpu("compute")};
};

TEST_F(TapeTest, GradientsAccumulateOverBranches) {
  const Tensor x = input({2});
  tape.watch(x);
  const Tensor y = add(tape, scale(tape, x, 3), add(tape, x, scale(tape, x, 5)));
  tape.backward(y);
  EXPECT_EQ(tape.grad(x).item(), 9);
}

TEST_F(TapeTest, SharedGradientsAreCopiedBeforeTheyGrow) {
  const Tensor x = input({1});
  tape.watch(x);
  const Tensor a = scale(tape, x, 1), b = scale(tape, a, 10);
  // d(a) and d(b) start as one tensor; d(a) then grows by 10 and d(b) must stay 1.
  tape.backward(add(tape, a, b));
  EXPECT_EQ(tape.grad(x).item(), 11);
}

TEST_F(TapeTest, ParameterGradientAssignsFirstThenAdds) {
  Parameter w{.name = "w", .shape = {1}, .init = Init::ones()};
  materialize({&w}, memory, 1);
  *w.grad.data<float>() = 1000;  // stale: the first write of a pass assigns
  tape.backward(add_parameter(tape, scale(tape, add_parameter(tape, input({1}), w), 4), w));
  EXPECT_EQ(w.grad.item(), 5);
  tape.backward(add_parameter(tape, input({1}), w));  // grad_written stays set: adds
  EXPECT_EQ(w.grad.item(), 6);
}

TEST_F(TapeTest, CountsUsesOfParameters) {
  Parameter w{.name = "w", .shape = {1}}, unused{.name = "unused", .shape = {1}};
  materialize({&w, &unused}, memory, 1);
  const Tensor y = add_parameter(tape, add_parameter(tape, input({1}), w), w);
  EXPECT_EQ(tape.pending_uses(w), 2);
  EXPECT_EQ(tape.pending_uses(unused), 0);
  tape.backward(y);
  EXPECT_EQ(tape.pending_uses(w), 0);
}

TEST_F(TapeTest, RegionsFireHooksInOrderAndRecomputeGivesTheSameGradient) {
  for (const bool recompute : {false, true}) {
    std::vector<std::string> log;
    LoggingHooks hooks(&log);
    const Block outer{"outer", {}, &hooks}, a{"a", {}, &hooks}, b{"b", {}, &hooks};
    const Tensor x = input({1});
    tape.watch(x);
    const Tensor y = tape.region(outer, [&] {
      const Tensor h =
          tape.region(a, [=, this] { return scale(tape, scale(tape, x, 2), 3); }, {recompute});
      return tape.region(b, [=, this] { return scale(tape, h, 5); }, {recompute});
    });
    EXPECT_EQ(tape.num_entries(), recompute ? 4u : 9u);
    tape.backward(y);
    EXPECT_EQ(tape.grad(x).item(), 30);
    EXPECT_EQ(log,
              (std::vector<std::string>{"+f outer", "+f a", "-f a", "+f b", "-f b", "-f outer",
                                        "+b outer", "+b b", "-b b", "+b a", "-b a", "-b outer"}));
    tape.clear();
  }
}

TEST_F(TapeTest, SeveralForwardsAndLossesBeforeBackward) {
  const Tensor x = input({1});
  tape.watch(x);
  const Tensor first = scale(tape, x, 2), second = scale(tape, x, 3);
  tape.backward(add(tape, first, second), 10);
  EXPECT_EQ(tape.grad(x).item(), 50);
}

TEST_F(TapeTest, NoGradRecordsNothing) {
  const Tensor x = input({1});
  const Tensor y = tape.no_grad([&] { return scale(tape, x, 2); });
  EXPECT_EQ(tape.num_entries(), 0u);
  EXPECT_THROW(tape.backward(y), InvalidArgument);
}

TEST_F(TapeTest, SecondBackwardThrows) {
  const Tensor x = input({1});
  const Tensor y = scale(tape, x, 2);
  tape.backward(y);
  EXPECT_THROW(tape.backward(y), InvalidArgument);
}

TEST_F(TapeTest, ReleasedParameterThrowsWithItsName) {
  Parameter w{.name = "h.0.w", .shape = {1}};
  materialize({&w}, memory, 1);
  w.value.buffer()->release();
  try {
    add_parameter(tape, input({1}), w);
    FAIL() << "expected a throw";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("h.0.w"), std::string::npos) << e.what();
  }
}

TEST_F(TapeTest, MemoryFallsDuringBackward) {
  const std::int64_t before = memory.stats().total_nbytes;
  {
    Tensor y = Tensor::zeros(memory, {1024}, DType::kF32);
    tape.watch(y);
    for (int i = 0; i < 10; ++i) y = scale(tape, y, 1.5f);
    const Tensor loss = tape.empty({}, DType::kF32, "loss");
    *loss.data<float>() = 0;
    tape.record("sum", loss,
                [&tape = tape, y](const Tensor&) { fill_zero(tape.grad_target(y).dst); });
    y = Tensor();
    const std::int64_t forward = memory.stats().total_nbytes;
    memory.reset_peaks();
    tape.backward(loss);
    // Each step back frees one activation and holds at most two gradients.
    EXPECT_LE(memory.stats().peak_total_nbytes, forward + 2 * 4096 + 64);
  }
  tape.clear();
  EXPECT_EQ(memory.stats().total_nbytes, before);
}

}  // namespace
}  // namespace tessera::engine
