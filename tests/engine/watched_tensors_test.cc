// Gradients of watched tensors: each backward gives its own, and what is dead takes no memory.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/tape_testing.h"

namespace tessera::engine {
namespace {

class WatchTest : public TapeTest {
 protected:
  std::int64_t nbytes() const { return memory.stats().total_nbytes; }
  const Block block{"h.0", {}, nullptr};
};

TEST_F(WatchTest, EachBackwardGivesItsOwnGradient) {
  for (const bool recompute : {false, true}) {
    for (const bool watches_again : {false, true}) {
      const Tensor x = input({1});
      tape.watch(x);
      for (int i = 0; i < 4; ++i) {
        if (watches_again) tape.watch(x);
        const float a = i == 2 ? 5 : 3;
        tape.backward(tape.region(block, [=, this] { return scale(tape, x, a); }, {recompute}));
        EXPECT_EQ(tape.grad(x).item(), a) << i << recompute << watches_again;
      }
      tape.clear();
    }
  }
}

TEST_F(WatchTest, OneBackwardAddsUpWhateverReachesTheInput) {
  const Tensor x = input({1});
  tape.watch(x);
  for (int i = 0; i < 2; ++i) {
    const Tensor first = scale(tape, x, 2), second = scale(tape, x, 3);
    tape.backward({first, second, add(tape, x, x)}, 10);
    EXPECT_EQ(tape.grad(x).item(), 10 * (2 + 3 + 2)) << i;
  }
}

// Of two forwards before the first backward it runs both: what the loss does not reach is dropped.
TEST_F(WatchTest, ABackwardThatReachesAnotherInputLeavesNoGradient) {
  const Tensor x = input({1}), y = input({1});
  tape.watch(x);
  tape.watch(y);
  tape.backward(scale(tape, x, 2));
  EXPECT_EQ(tape.grad(x).item(), 2);
  EXPECT_FALSE(tape.grad(y).defined());
  scale(tape, x, 7);
  tape.backward(scale(tape, y, 3));
  EXPECT_FALSE(tape.grad(x).defined()) << "of the backward before";
  EXPECT_EQ(tape.grad(y).item(), 3);
}

// A generator's output is data for the critic's pass, and its gradient there data for its own.
TEST_F(WatchTest, AGradientThatIsHeldStaysAsItIs) {
  const Tensor z = input({1});
  tape.watch(z);
  const Tensor fake = tape.no_grad([&] { return scale(tape, z, 2); });
  tape.watch(fake);
  tape.backward(scale(tape, fake, 5));
  const Tensor held = tape.grad(fake);
  EXPECT_EQ(held.item(), 5);
  EXPECT_FALSE(tape.grad(z).defined());
  for (int i = 0; i < 3; ++i) {
    const Tensor y = scale(tape, z, 2), loss = tape.empty({}, DType::kF32, "loss");
    *loss.data<float>() = 0;
    tape.record("dot", loss, [this, y, held](const Tensor&) { tape.pass_grad(y, held); });
    tape.backward(loss);
    EXPECT_EQ(tape.grad(z).item(), 10);
    EXPECT_FALSE(tape.grad(fake).defined());
    EXPECT_EQ(held.item(), 5);
    tape.backward(scale(tape, fake, 7));
    EXPECT_EQ(tape.grad(fake).item(), 7);
    EXPECT_EQ(held.item(), 5) << "nothing is added to it";
  }
}

TEST_F(WatchTest, AnActivationGivesTheGradientOfItsBackward) {
  for (const bool recompute : {false, true}) {
    const Tensor x = input({1});
    Tensor before;
    for (int i = 0; i < 3; ++i) {
      const Tensor h = tape.region(block, [x, this] { return scale(tape, x, 2); }, {recompute});
      tape.watch(h);
      tape.backward(scale(tape, h, 5));
      EXPECT_EQ(tape.grad(h).item(), 5);
      EXPECT_TRUE(!before.defined() || !tape.grad(before).defined()) << "of the step before";
      before = h;
    }
    // Once it has run backward it is data, and an input of the next pass.
    tape.backward(scale(tape, before, 11));
    EXPECT_EQ(tape.grad(before).item(), 11);
    tape.clear();
  }
}

// Those of parameters are their owner's, who says when a pass begins.
TEST_F(WatchTest, GradientsOfParametersStillAddUp) {
  Parameter w{.name = "w", .shape = {1}, .init = Init::ones()};
  materialize({&w}, memory, 1);
  const Tensor x = input({1});
  tape.watch(x);
  for (int i = 1; i <= 3; ++i) {
    tape.backward(scale(tape, add_parameter(tape, x, w), 4));
    EXPECT_EQ(w.grad.item(), 4 * i);
    EXPECT_EQ(tape.grad(x).item(), 4);
  }
}

TEST_F(WatchTest, InputsThatDieTakeTheirGradientsWithThem) {
  constexpr std::int64_t kNumel = 1024, kNbytes = 4 * kNumel;
  for (const bool recompute : {false, true}) {
    const std::int64_t before = nbytes();
    std::int64_t most = 0;
    for (int i = 0; i < 100; ++i) {
      const Tensor x = Tensor::zeros(memory, {kNumel}, DType::kF32);
      tape.watch(x);
      EXPECT_EQ(nbytes(), before + kNbytes) << "of the one before nothing is left";
      const Tensor h = tape.region(block, [=, this] { return scale(tape, x, 2); }, {recompute});
      const Tensor loss = tape.empty({}, DType::kF32, "loss");
      tape.record("sum", loss, [this, h](const Tensor&) { fill_zero(tape.grad_target(h).dst); });
      tape.backward(loss);
      EXPECT_TRUE(tape.grad(x).defined());
      most = std::max(most, nbytes() - before);
    }
    EXPECT_LE(most, 3 * kNbytes + 64) << "an input, an activation and a gradient";
    // The last one goes with the next backward, of whatever.
    const Tensor x = input({1});
    tape.backward(scale(tape, x, 1));
    EXPECT_EQ(nbytes(), before + x.nbytes()) << recompute;
  }
}

// What was recorded with a tensor means to write its gradient, whoever still holds it.
TEST_F(WatchTest, AnInputMayDieBeforeItsBackward) {
  Tensor x = input({1});
  tape.watch(x);
  const Tensor y = tape.empty({1}, DType::kF32, "y");
  bool is_wanted = false;
  tape.record("op", y, [&, handle = x.without_data()](const Tensor& dy) {
    const GradTarget dx = tape.grad_target(handle);
    is_wanted = static_cast<bool>(dx);
    if (is_wanted) assign_or_add(dx.dst, dy, dx.accumulate);
  });
  x = Tensor();
  const Tensor other = input({1});
  tape.watch(other);
  tape.backward(y);
  EXPECT_TRUE(is_wanted);
  EXPECT_EQ(nbytes(), y.nbytes() + other.nbytes()) << "and nobody keeps it";
}

// An error gives all of it back.
TEST_F(WatchTest, ABackwardThatFailsLeavesNoGradient) {
  const Tensor x = input({1});
  tape.watch(x);
  tape.backward(scale(tape, x, 3));
  const Tensor y = scale(tape, x, 2), bad = tape.empty({1}, DType::kF32, "bad");
  tape.record("bad", bad, [](const Tensor&) { fail("broken"); });
  EXPECT_THROW(tape.backward({bad, y}), InvalidArgument);
  EXPECT_FALSE(tape.grad(x).defined());
  EXPECT_FALSE(tape.needs_grad(x)) << "what was watched is forgotten";
  // One that is refused before it begins leaves what there is.
  tape.watch(x);
  tape.backward(scale(tape, x, 3));
  EXPECT_THROW(tape.backward(x), InvalidArgument);
  EXPECT_EQ(tape.grad(x).item(), 3);
}

}  // namespace
}  // namespace tessera::engine
