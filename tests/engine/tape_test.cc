// The tape: order, accumulation, regions, recompute, use counts, memory during backward.
#include "engine/tape.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/tape_testing.h"

namespace tessera::engine {
namespace {

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
  tape.watch(b);
  // d(a) and d(b) start as one tensor; d(a) then grows by 10 and d(b) must stay 1.
  tape.backward(add(tape, a, b));
  EXPECT_EQ(tape.grad(x).item(), 11);
  EXPECT_EQ(tape.grad(b).item(), 1);
}

TEST_F(TapeTest, SharedGradientsThatAreStillNeededStayAsTheyAre) {
  const Tensor x = input({1});
  tape.watch(x);
  const Tensor a = scale(tape, x, 1), b = scale(tape, x, 2), c = scale(tape, b, 10);
  // One tensor is handed to all three. d(b) grows by 10 before d(a) is read.
  tape.backward(add(tape, add(tape, a, b), c));
  EXPECT_EQ(tape.grad(x).item(), 1 + 2 * 11);
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

TEST_F(TapeTest, SliceOfAnActivationIsRefused) {
  const Tensor x = input({1, 2});
  const Tensor slice = x.slice(0, {1});  // of an input: data, as any other
  const Tensor y = scale(tape, add(tape, x, x), 2);
  tape.backward(scale(tape, scale(tape, slice, 2), 3));
  const Tensor h = scale(tape, x, 2);
  const Tensor loss = scale(tape, h.slice(1, {1}), 3);
  EXPECT_THROW(tape.backward(loss), InvalidArgument);
  EXPECT_EQ(tape.num_entries(), 0u);
}

TEST_F(TapeTest, ClosuresOfPassThroughOpsNeedNoData) {
  const Tensor x = input({3});
  tape.watch(x);
  const std::int64_t before = memory.stats().total_nbytes;
  Tensor y = scale(tape, x, 2);
  const Tensor handle = y.without_data();
  y = scale(tape, x, 3);
  EXPECT_EQ(memory.stats().total_nbytes, before + 4) << "the first output is freed";
  EXPECT_TRUE(tape.needs_grad(handle));
  EXPECT_THROW(handle.data<float>(), InvalidArgument);
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

// y = x, and says when its backward runs.
Tensor probe(Tape& tape, const Tensor& x, std::function<void()> in_backward) {
  const Tensor y = tape.empty(x.shape(), x.dtype(), "probe");
  cast(y, x);
  tape.record("probe", y, [&tape, x = x.without_data(), in_backward](const Tensor& dy) {
    in_backward();
    tape.pass_grad(x, dy);
  });
  return y;
}

TEST_F(TapeTest, MemoryFallsDuringBackward) {
  constexpr std::int64_t kDepth = 10, kNbytes = 4096;
  for (const bool recompute : {false, true}) {
    const std::int64_t before = memory.stats().total_nbytes;
    std::vector<std::int64_t> alive;
    const auto note = [&] { alive.push_back(memory.stats().total_nbytes - before); };
    {
      Tensor y = Tensor::zeros(memory, {1024}, DType::kF32);
      tape.watch(y);
      const Block block{"block", {}, nullptr};
      for (int i = 0; i < kDepth; ++i) {
        y = probe(tape, y, note);
        y = tape.region(block, [y, this] { return scale(tape, scale(tape, y, 1.5f), 2); },
                        {recompute});
      }
      const Tensor loss = tape.empty({}, DType::kF32, "loss");
      *loss.data<float>() = 0;
      tape.record("sum", loss,
                  [&tape = tape, y](const Tensor&) { fill_zero(tape.grad_target(y).dst); });
      y = Tensor();
      memory.reset_peaks();
      const std::int64_t forward = memory.stats().total_nbytes;
      tape.backward(loss);
      // Each step back frees what it made and holds two gradients, or makes its inside again.
      EXPECT_LE(memory.stats().peak_total_nbytes, forward + (recompute ? 3 : 2) * kNbytes + 64);
    }
    // Only the gradient that is handed on and the activations of the blocks still to come.
    ASSERT_EQ(alive.size(), std::size_t{kDepth});
    for (std::int64_t i = 1; i < kDepth; ++i) {
      EXPECT_EQ(alive[std::size_t(i - 1)] - alive[std::size_t(i)], (recompute ? 1 : 2) * kNbytes);
    }
    EXPECT_LE(alive.back(), 3 * kNbytes);
    tape.clear();
    EXPECT_EQ(memory.stats().total_nbytes, before);
  }
}

// (n) -> (k), (n - k): the elements before and from k on.
std::vector<Tensor> split(Tape& tape, const Tensor& x, std::int64_t k, std::vector<bool>* reached) {
  std::vector<Tensor> outs;
  for (const auto& [begin, numel] : {std::pair{std::int64_t{0}, k}, std::pair{k, x.numel() - k}}) {
    outs.push_back(tape.empty({numel}, x.dtype(), "split"));
    cast(outs.back(), x.slice(begin, {numel}));
  }
  tape.record("split", outs, [&tape, x, k, reached](const std::vector<Tensor>& douts) {
    reached->clear();
    for (const Tensor& d : douts) reached->push_back(d.defined());
    const GradTarget dx = tape.grad_target(x);
    ASSERT_FALSE(dx.accumulate);
    fill_zero(dx.dst);
    if (douts[0].defined()) cast(dx.dst.slice(0, {k}), douts[0]);
    if (douts[1].defined()) cast(dx.dst.slice(k, {x.numel() - k}), douts[1]);
  });
  return outs;
}

TEST_F(TapeTest, SeveralOutputsRunOnceIfAGradientReachesAny) {
  for (const int wanted : {0, 1}) {
    const Tensor x = input({2, 3});
    tape.watch(x);
    std::vector<bool> reached;
    const std::vector<Tensor> outs = split(tape, x, 1, &reached);
    tape.backward(scale(tape, outs[static_cast<std::size_t>(wanted)], 7));
    EXPECT_EQ(reached, (std::vector<bool>{wanted == 0, wanted == 1}));
    EXPECT_EQ(tape.grad(x).data<float>()[wanted], 7);
    EXPECT_EQ(tape.grad(x).data<float>()[1 - wanted], 0);
    tape.clear();
  }
  const Tensor x = input({2, 3}), other = input({1});
  std::vector<bool> reached;
  split(tape, x, 1, &reached);
  tape.backward(scale(tape, other, 1));
  EXPECT_TRUE(reached.empty()) << "no gradient came here";
}

TEST_F(TapeTest, BackwardSeesTheShapeOfItsOutputWhateverViewsWereUsed) {
  for (const bool recompute : {false, true}) {
    Shape seen;
    const auto op = [&] {
      const Tensor y = tape.empty({2, 3}, DType::kF32, "y");
      fill_zero(y);
      tape.record("op", y, [&seen](const Tensor& dy) { seen = dy.shape(); });
      return y;
    };
    const Block block{"block", {}, nullptr};
    const Tensor y = tape.region(block, op, {recompute});
    const Tensor loss = tape.empty({}, DType::kF32, "loss");
    tape.record("sum", loss,
                [this, y](const Tensor&) { fill_zero(tape.grad_target(y.reshape({6})).dst); });
    tape.backward(loss);
    EXPECT_EQ(seen, (Shape{2, 3}));
  }
}

TEST_F(TapeTest, WatchedActivationsKeepTheirGradient) {
  for (const bool recompute : {false, true}) {
    const Tensor x = input({1});
    const Block block{"block", {}, nullptr};
    const Tensor h = tape.region(block, [x, this] { return scale(tape, x, 2); }, {recompute});
    tape.watch(x);
    tape.watch(h);
    tape.backward(scale(tape, h, 5));
    EXPECT_EQ(tape.grad(h).item(), 5);
    EXPECT_EQ(tape.grad(x).item(), 10);
    tape.clear();
    EXPECT_FALSE(tape.grad(x).defined());
  }
}

TEST_F(TapeTest, GradientsOfAnotherSizeOrDtypeAreRefused) {
  const Tensor x = input({1, 2});
  tape.watch(x);
  for (const Tensor& dx :
       {Tensor::zeros(memory, {3}, DType::kF32), Tensor::zeros(memory, {2}, DType::kBF16)}) {
    const std::string error = error_of<InvalidArgument>([&] { tape.pass_grad(x, dx); });
    EXPECT_TRUE(has(error, {"f32 (2)", dx.shape().str(), "x"}));
  }
}

TEST_F(TapeTest, FrozenParametersWantNoGradientAndTrainableOnesNeedAView) {
  Parameter frozen{.name = "frozen", .shape = {1}, .init = Init::ones(), .trainable = false};
  materialize({&frozen}, memory, 1);
  const Tensor x = input({1});
  tape.watch(x);
  tape.backward(add_parameter(tape, x, frozen));
  EXPECT_EQ(tape.grad(x).item(), 1);
  EXPECT_FALSE(frozen.grad_written);
  EXPECT_FALSE(tape.grad_target(frozen));

  Parameter bare{.name = "bare", .shape = {2}};
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tape.use(bare); }), {"bare", "value"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tape.grad_target(bare); }), {"bare"}));
  bare.grad = Tensor::zeros(memory, {3}, DType::kF32);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { tape.grad_target(bare); }), {"bare", "(2)", "(3)"}));
}

// y = x. Backward leaves `parts` beside the gradient of x.
Tensor leave_sums(Tape& tape, const Tensor& x, const Tensor& parts) {
  const Tensor y = tape.empty(x.shape(), x.dtype(), "leave_sums");
  assign_or_add(y, x, false);
  tape.record("leave_sums", y, [&tape, x, parts](const Tensor& dy) {
    const GradTarget dx = tape.grad_target(x);
    assign_or_add(dx.dst, dy, dx.accumulate);
    tape.leave_column_sums(dx.dst, parts);
  });
  return y;
}

TEST_F(TapeTest, SumsStayWithAGradientUntilMoreIsAdded) {
  const Tensor x = input({1, 2}), parts = Tensor::zeros(memory, {4, 2}, DType::kF32);
  // What was left with the gradient of h, as whoever made h finds it.
  const auto left = [&](const std::function<Tensor(const Tensor& h)>& op) {
    tape.clear();
    tape.watch(x);
    const Tensor start = tape.empty({2}, DType::kF32, "start");
    std::int64_t num_owners = 0;
    tape.record("start", start, [&](const Tensor&) { num_owners = parts.buffer().use_count(); });
    const Tensor h = tape.empty({2}, DType::kF32, "h");
    assign_or_add(h, x, false);
    Tensor sums;
    tape.record("h", h, [&](const Tensor& dh) {
      sums = tape.column_sums(dh);
      EXPECT_FALSE(tape.column_sums(dh.reshape({2, 1})).defined()) << "other columns";
      assign_or_add(tape.grad_target(start).dst, dh, false);
    });
    const Tensor y = op(h), loss = tape.empty({}, DType::kF32, "loss");
    tape.record("loss", loss, [&, y](const Tensor&) { tape.pass_grad(y, x); });
    tape.backward(loss);
    const bool found = sums.defined();
    EXPECT_TRUE(!found || sums.key() == parts.key());
    EXPECT_EQ(num_owners, 1 + (found ? 1 : 0)) << "with the gradient they go";
    return found;
  };
  EXPECT_TRUE(left([&](const Tensor& h) { return leave_sums(tape, h, parts); }));
  EXPECT_TRUE(left([&](const Tensor& h) { return leave_sums(tape, scale(tape, h, 1), parts); }) ==
              false)
      << "of another tensor";
  EXPECT_TRUE(left([&](const Tensor& h) { return add(tape, h, leave_sums(tape, h, parts)); }))
      << "who adds last may leave them";
  EXPECT_FALSE(left([&](const Tensor& h) {
    const Tensor a = scale(tape, h, 2);
    return add(tape, a, leave_sums(tape, h, parts));
  })) << "written behind them";
  EXPECT_FALSE(left([&](const Tensor& h) {
    const Tensor a = add(tape, h, h);
    return add(tape, a, leave_sums(tape, h, parts));
  })) << "passed behind them";
  const Tensor dx = input({1, 2});
  for (const Shape& shape : {Shape{2}, Shape{4, 3}}) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      tape.leave_column_sums(dx, Tensor::zeros(memory, shape, DType::kF32));
                    }),
                    {"(n, 2)", shape.str()}));
  }
}

TEST_F(TapeTest, KnowsWhoWantsAGradient) {
  const Tensor data = input({1}), leaf = input({1});
  tape.watch(leaf);
  const Tensor y = scale(tape, data, 2);
  EXPECT_FALSE(tape.needs_grad(data));
  EXPECT_TRUE(tape.needs_grad(leaf));
  EXPECT_TRUE(tape.needs_grad(y));
  EXPECT_FALSE(tape.no_grad([&] { return tape.needs_grad(y); }));
  const Block block{"block", {}, nullptr};
  std::vector<bool> asked;
  const Tensor z = tape.region(
      block, [&asked, y, this] { return asked.push_back(tape.needs_grad(y)), scale(tape, y, 3); },
      {.recompute = true});
  tape.backward(z);
  EXPECT_EQ(asked, (std::vector<bool>{false, true})) << "saved only by the recomputation";
}

TEST_F(TapeTest, AnErrorInBackwardClearsTheTape) {
  Parameter w{.name = "w", .shape = {1}};
  materialize({&w}, memory, 1);
  struct Failing : LoggingHooks {
    using LoggingHooks::LoggingHooks;
    void after_backward(const Block&, const Tape&) override { throw CommError("peer gone"); }
  };
  std::vector<std::string> log;
  Failing failing(&log);
  const Block block{"block", {}, &failing};
  const Tensor x = input({1});
  tape.watch(x);
  for (const bool in_hook : {false, true}) {
    Tensor y = add_parameter(tape, x, w);
    if (in_hook) {
      y = tape.region(block, [&] { return scale(tape, y, 2); });
    } else {
      const Tensor in = y;
      y = tape.empty({1}, DType::kF32, "bad");
      tape.record("bad", y, [](const Tensor&) { throw CommError("peer gone"); });
    }
    EXPECT_EQ(error_of<CommError>([&] { tape.backward(y); }), "peer gone");
    EXPECT_EQ(tape.num_entries(), 0u);
    EXPECT_EQ(tape.pending_uses(w), 0);
    EXPECT_FALSE(tape.needs_grad(x));
  }
  tape.watch(x);
  tape.backward(scale(tape, x, 3));
  EXPECT_EQ(tape.grad(x).item(), 3) << "usable again, nothing left over";
}

TEST_F(TapeTest, ARefusedLossLeavesTheTapeAsItWas) {
  const Tensor x = input({1});
  tape.watch(x);
  const Tensor y = scale(tape, x, 3);
  EXPECT_THROW(tape.backward(std::vector<Tensor>{y, input({1})}), InvalidArgument);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    tape.backward(scale(tape, input({1, 2}), 1));
                  }),
                  {"one element", "(2)"}));
  EXPECT_THROW(tape.no_grad([&] { tape.backward(y); }), InvalidArgument);
  tape.backward(y);
  EXPECT_EQ(tape.grad(x).item(), 3);
}

TEST_F(TapeTest, SeveralLossesAddUp) {
  const Tensor x = input({1});
  tape.watch(x);
  const Tensor a = scale(tape, x, 2), b = scale(tape, a, 10);
  tape.backward(std::vector<Tensor>{a, b, b}, 0.5f);
  EXPECT_EQ(tape.grad(x).item(), 0.5f * (2 + 20 + 20));
}

TEST_F(TapeTest, RecomputationKeepsOnlyTheOutputAndCountsUses) {
  Parameter w{.name = "w", .shape = {1024}, .init = Init::ones()};
  materialize({&w}, memory, 1);
  const Tensor x = Tensor::zeros(memory, {1024}, DType::kF32);
  const Block outer{"outer", {}, nullptr}, inner{"inner", {}, nullptr};
  const std::int64_t before = memory.stats().total_nbytes;
  Tensor h =
      tape.region(outer,
                  [=, this, &w, &inner] {
                    Tensor y = add_parameter(tape, x, w);
                    for (int i = 0; i < 5; ++i) y = scale(tape, y, 2);
                    return tape.region(
                        inner, [=, this, &w] { return add_parameter(tape, scale(tape, y, 3), w); },
                        {.recompute = true});
                  },
                  {.recompute = true});
  EXPECT_EQ(memory.stats().total_nbytes - before, 4096);
  EXPECT_EQ(tape.pending_uses(w), 2);
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("sum", loss, [this, h](const Tensor&) {
    for (float& v : tape.grad_target(h).dst.span<float>()) v = 1;
  });
  h = Tensor();
  tape.backward(loss);
  EXPECT_EQ(tape.pending_uses(w), 0);
  for (const float d : w.grad.span<float>()) ASSERT_EQ(d, 32 * 3 + 1);
}

// Whoever counts uses to know when a gradient is final must not see 0 before the last is written.
TEST_F(TapeTest, AReplayHoldsItsUsesUntilItHasRecordedThemAgain) {
  Parameter w{.name = "w", .shape = {1}, .init = Init::ones()};
  materialize({&w}, memory, 1);
  std::vector<std::int64_t> pending;
  struct Watching : RegionHooks {
    std::vector<std::int64_t>* pending;
    Parameter* w;
    void before_forward(const Block&, const Tape& tape) override { see(tape); }
    void after_forward(const Block&, const Tape& tape, bool) override { see(tape); }
    void before_backward(const Block&, const Tape& tape) override { see(tape); }
    void after_backward(const Block&, const Tape& tape) override { see(tape); }
    void see(const Tape& tape) const { pending->push_back(tape.pending_uses(*w)); }
  } hooks;
  hooks.pending = &pending;
  hooks.w = &w;
  const Block block{"block", {&w}, &hooks};
  const Tensor x = input({1});
  const Tensor y = tape.region(
      block, [=, this, &w] { return add_parameter(tape, add_parameter(tape, x, w), w); },
      {.recompute = true});
  tape.backward(y);
  // Around the forward, before the backward, and after it.
  EXPECT_EQ(pending, (std::vector<std::int64_t>{0, 2, 2, 0}));

  pending.clear();
  const Block twice{"twice", {&w}, &hooks};
  Tensor z = x;
  for (int i = 0; i < 2; ++i) {
    z = tape.region(twice, [=, this, &w] { return add_parameter(tape, z, w); },
                    {.recompute = i == 1});
  }
  tape.backward(z);
  EXPECT_EQ(pending, (std::vector<std::int64_t>{0, 1, 1, 2, 2, 1, 1, 0}));
}

TEST_F(TapeTest, UsesWithoutRecordingAreNotCounted) {
  Parameter w{.name = "w", .shape = {1}};
  materialize({&w}, memory, 1);
  tape.no_grad([&] { return add_parameter(tape, input({1}), w); });
  EXPECT_EQ(tape.pending_uses(w), 0);
}

TEST_F(TapeTest, ClearForgetsAndFrees) {
  const std::int64_t before = memory.stats().total_nbytes;
  {
    const Tensor x = Tensor::zeros(memory, {100}, DType::kF32);
    tape.watch(x);
    Tensor y = x;
    for (int i = 0; i < 3; ++i) y = scale(tape, y, 2);
  }
  EXPECT_GT(memory.stats().total_nbytes, before);
  tape.clear();
  EXPECT_EQ(tape.num_entries(), 0u);
  EXPECT_EQ(memory.stats().total_nbytes, before);
}

}  // namespace
}  // namespace tessera::engine
