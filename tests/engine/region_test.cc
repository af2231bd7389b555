// Recomputed regions: several outputs, outputs that were there before, tensors that escape, and
// regions in which nothing wants a gradient.
#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/engine/tape_testing.h"

namespace tessera::engine {
namespace {

// What asks before it records, as the ops of ops/ do: a * x.
Tensor polite_scale(Tape& tape, const Tensor& x, float a) {
  if (tape.needs_grad(x)) return scale(tape, x, a);
  const Tensor y = tape.empty(x.shape(), x.dtype(), "scale");
  for (std::int64_t i = 0; i < x.numel(); ++i) y.data<float>()[i] = a * x.data<float>()[i];
  return y;
}

Tensor polite_add_parameter(Tape& tape, const Tensor& x, Parameter& w) {
  const bool wanted = tape.needs_grad(x) || tape.needs_grad(w);
  if (wanted) return add_parameter(tape, x, w);
  return tape.no_grad([&] { return add_parameter(tape, x, w); });
}

class RegionTest : public TapeTest {
 protected:
  const Block block{"h.0", {}, nullptr}, inner{"h.0.inner", {}, nullptr};
};

TEST_F(RegionTest, SeveralOutputsHaveTheirOwnGradients) {
  for (const bool recompute : {false, true}) {
    const Tensor x = input({1});
    tape.watch(x);
    const std::vector<Tensor> out =
        tape.region(block,
                    [x, this] {
                      const Tensor h = scale(tape, x, 2);
                      return std::vector<Tensor>{scale(tape, h, 3), scale(tape, h, 5), h};
                    },
                    {recompute});
    ASSERT_EQ(out.size(), 3u);
    tape.backward({scale(tape, out[0], 7), out[1], scale(tape, out[2], 100)});
    EXPECT_EQ(tape.grad(x).item(), 2 * (3 * 7 + 5 + 100)) << recompute;
    tape.clear();
  }
}

TEST_F(RegionTest, AnErrorOfTheSecondRunSaysThatItIsOne) {
  const Tensor x = input({1});
  tape.watch(x);
  bool is_second = false;
  const Tensor y = tape.region(block,
                               [&, x] {
                                 require(!is_second, "[toy] expected the same again");
                                 return scale(tape, x, 2);
                               },
                               {.recompute = true});
  is_second = true;
  EXPECT_EQ(error_of<InvalidArgument>([&] { tape.backward(y); }),
            "[toy] expected the same again (while region 'h.0', which is recomputed, ran again in "
            "backward)");
}

TEST_F(RegionTest, OneOutputOfSeveralIsEnough) {
  for (const bool recompute : {false, true}) {
    for (const std::size_t wanted : {0u, 1u}) {
      const Tensor x = input({1});
      tape.watch(x);
      int runs = 0;
      const std::vector<Tensor> out =
          tape.region(block,
                      [x, &runs, this] {
                        ++runs;
                        return std::vector<Tensor>{scale(tape, x, 3), scale(tape, x, 5)};
                      },
                      {recompute});
      tape.backward(out[wanted]);
      EXPECT_EQ(tape.grad(x).item(), wanted == 0 ? 3 : 5);
      EXPECT_EQ(runs, recompute ? 2 : 1);
      tape.clear();
    }
  }
}

TEST_F(RegionTest, TwoOutputsMayBeOneTensor) {
  for (const bool recompute : {false, true}) {
    const Tensor x = input({1, 2});
    tape.watch(x);
    const std::vector<Tensor> out = tape.region(block,
                                                [x, this] {
                                                  const Tensor h = scale(tape, x, 2);
                                                  return std::vector<Tensor>{h, h.reshape({2, 1})};
                                                },
                                                {recompute});
    // Each element of the output has the gradient 1.
    const Tensor loss = tape.empty({}, DType::kF32, "loss");
    const Tensor sum = add(tape, scale(tape, out[0], 3), scale(tape, out[1].reshape({2}), 5));
    tape.record("sum", loss, [sum, this](const Tensor&) {
      launch_set(tape.stream(), tape.grad_target(sum).dst, 1, "ones");
    });
    tape.backward(loss);
    EXPECT_EQ(tape.grad(x).data<float>()[1], 16) << recompute;
    tape.clear();
  }
}

// dropout(p = 0) is such an op.
TEST_F(RegionTest, AnOutputThatIsTheInputPassesItsGradientOnce) {
  for (const bool recompute : {false, true}) {
    for (const bool is_leaf : {false, true}) {
      for (const bool nested : {false, true}) {
        const Tensor x = input({1});
        tape.watch(x);
        const Tensor in = is_leaf ? x : scale(tape, x, 2);
        const Tensor out =
            tape.region(block,
                        [=, this] {
                          scale(tape, in, 99);  // or there would be nothing to run again
                          return nested ? tape.region(inner, [in] { return in; }, {recompute}) : in;
                        },
                        {recompute});
        tape.backward(add(tape, scale(tape, out, 3), scale(tape, in, 10)));
        EXPECT_EQ(tape.grad(x).item(), (is_leaf ? 1 : 2) * 13)
            << recompute << " " << is_leaf << " " << nested;
        tape.clear();
      }
    }
  }
}

TEST_F(RegionTest, InputAndWhatIsComputedFromItMayBothBeOutputs) {
  for (const bool recompute : {false, true}) {
    const Tensor x = input({1});
    tape.watch(x);
    const Tensor in = scale(tape, x, 2);
    const std::vector<Tensor> out =
        tape.region(block,
                    [=, this] {
                      return std::vector<Tensor>{in, scale(tape, in, 3), in};
                    },
                    {recompute});
    tape.backward(add(tape, add(tape, out[0], out[2]), scale(tape, out[1], 5)));
    EXPECT_EQ(tape.grad(x).item(), 2 * (1 + 1 + 15)) << recompute;
    tape.clear();
  }
}

TEST_F(RegionTest, AnInnerRegionMayReturnWhatTheOuterMade) {
  const Tensor x = input({1});
  tape.watch(x);
  const Tensor out = tape.region(block,
                                 [=, this] {
                                   const Tensor h = scale(tape, x, 2);
                                   const Tensor same =
                                       tape.region(inner, [h] { return h; }, {.recompute = true});
                                   return add(tape, same, scale(tape, h, 3));
                                 },
                                 {.recompute = true});
  tape.backward(out);
  EXPECT_EQ(tape.grad(x).item(), 8);
}

// A reference to a tensor that has been assigned to since, or whose scope is gone.
TEST_F(RegionTest, WhatARecomputedRegionReadMustNotBeGone) {
  const Tensor x = input({1});
  tape.watch(x);
  const auto of_two_layers = [&](bool by_value) {
    Tensor h = scale(tape, x, 2);
    for (int layer = 0; layer < 2; ++layer) {
      h = by_value
              ? tape.region(
                    block, {.recompute = true},
                    [this](const Tensor& in) { return polite_scale(tape, in, 3); }, h)
              : tape.region(block, [&] { return polite_scale(tape, h, 3); }, {.recompute = true});
    }
    tape.backward(h);
  };
  of_two_layers(true);
  EXPECT_EQ(tape.grad(x).item(), 18);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { of_two_layers(false); }),
                  {"[region]", "which the function of h.0 read in forward", "gone", "by value"}));
  EXPECT_EQ(tape.num_entries(), 0u);
}

TEST_F(RegionTest, WhatLeavesARecomputedRegionByCaptureIsRefused) {
  const Tensor x = input({1});
  tape.watch(x);
  Tensor escaped;
  const Tensor out = tape.region(block,
                                 [=, &escaped, this] {
                                   escaped = scale(tape, x, 3);
                                   return scale(tape, escaped, 2);
                                 },
                                 {.recompute = true});
  const auto is_refused = [&](const std::function<void()>& use) {
    EXPECT_TRUE(has(error_of<InvalidArgument>(use), {"[region]", "h.0", "capture", "scale"}));
  };
  is_refused([&] { tape.needs_grad(escaped); });
  is_refused([&] { tape.watch(escaped); });
  is_refused([&] { tape.backward({out, escaped}); });
  // Inside the next region, whether it is recomputed or not.
  for (const bool recompute : {false, true}) {
    is_refused(
        [&] { tape.region(inner, [&] { return polite_scale(tape, escaped, 2); }, {recompute}); });
  }
  EXPECT_EQ(escaped.item(), 3) << "its value may be read";
  EXPECT_EQ(tape.no_grad([&] { return polite_scale(tape, escaped, 2); }).item(), 6);
  // An op that does not ask learns it in backward.
  const Tensor sum = add(tape, out, scale(tape, escaped, 5));
  is_refused([&] { tape.backward(sum); });
  EXPECT_EQ(tape.num_entries(), 0u);
}

TEST_F(RegionTest, WhatLeavesARegionThatIsNotRecomputedHasAGradient) {
  const Tensor x = input({1});
  tape.watch(x);
  Tensor aside;
  const Tensor out = tape.region(block, [&] {
    aside = scale(tape, x, 3);
    return scale(tape, x, 2);
  });
  tape.backward({out, aside});
  EXPECT_EQ(tape.grad(x).item(), 5);
}

TEST_F(RegionTest, DataMayLeaveARecomputedRegion) {
  const Tensor x = input({1});
  tape.watch(x);
  Tensor integers, made_without_gradient, made_elsewhere;
  const Tensor before = scale(tape, input({1}), 7);
  const Tensor out = tape.region(block,
                                 [=, &integers, &made_without_gradient, &made_elsewhere, this] {
                                   integers = tape.empty({1}, DType::kI32, "targets");
                                   made_elsewhere = input({2});
                                   made_without_gradient =
                                       tape.no_grad([&] { return scale(tape, x, 2); });
                                   return add(tape, scale(tape, x, 2), before);
                                 },
                                 {.recompute = true});
  for (const Tensor& t : {integers, made_without_gradient, made_elsewhere}) {
    EXPECT_FALSE(tape.needs_grad(t));
  }
  EXPECT_TRUE(tape.needs_grad(before));
  tape.backward(out);
  EXPECT_EQ(tape.grad(x).item(), 2);
  // In the next step it is what every old activation is: data.
  Tensor kept;
  tape.backward(tape.region(block, [=, &kept, this] { return kept = scale(tape, x, 2); },
                            {.recompute = true}));
  EXPECT_FALSE(tape.needs_grad(kept));
}

TEST_F(RegionTest, FewerOutputsTheSecondTimeAreRefused) {
  const Tensor x = input({1});
  tape.watch(x);
  int runs = 0;
  const std::vector<Tensor> out = tape.region(block,
                                              [x, &runs, this] {
                                                std::vector<Tensor> results = {scale(tape, x, 2)};
                                                if (++runs == 1)
                                                  results.push_back(scale(tape, x, 3));
                                                return results;
                                              },
                                              {.recompute = true});
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tape.backward(out[1]); }),
                  {"h.0", "output 1", "1 outputs"}));
}

TEST_F(RegionTest, ARegionInWhichNothingIsWantedIsNotRunAgain) {
  Parameter frozen{.name = "frozen", .shape = {1}, .init = Init::ones(), .trainable = false};
  Parameter w{.name = "w", .shape = {1}, .init = Init::ones()};
  materialize({&frozen, &w}, memory, 1);
  std::vector<std::string> log;
  LoggingHooks hooks(&log);
  const Block lower{"lower", {&frozen}, &hooks}, upper{"upper", {&w}, &hooks};
  for (const bool recompute : {false, true}) {
    log.clear();
    int runs = 0;
    const Tensor x = input({1});
    const Tensor h =
        tape.region(lower,
                    [x, &frozen, &runs, this] {
                      ++runs;
                      return polite_scale(tape, polite_add_parameter(tape, x, frozen), 2);
                    },
                    {recompute});
    EXPECT_FALSE(tape.needs_grad(h));
    EXPECT_EQ(tape.pending_uses(frozen), 0) << "not recorded";
    EXPECT_EQ(tape.num_entries(), 2u) << "for the hooks alone";
    const Tensor y =
        tape.region(upper, [h, &w, this] { return polite_add_parameter(tape, h, w); }, {recompute});
    tape.backward(y);
    EXPECT_EQ(runs, 1);
    EXPECT_EQ(w.grad.item(), 1);
    w.grad_written = false;
    EXPECT_EQ(log, (std::vector<std::string>{"+f lower", "-f, no op: lower", "+f upper", "-f upper",
                                             "+b upper", "-b upper", "+b lower", "-b lower"}));
  }
}

TEST_F(RegionTest, ALossThatNothingTrainableReachesIsRefused) {
  const Tensor y = polite_scale(tape, input({1}), 2);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tape.backward(y); }), {"trainable", "scale"}));
}

TEST_F(RegionTest, UsesOfOpsThatDoNotRecordEndWithTheirRegion) {
  Parameter frozen{.name = "frozen", .shape = {1}, .init = Init::ones(), .trainable = false};
  materialize({&frozen}, memory, 1);
  const auto use = [&frozen, this](const Tensor& x) {
    tape.use(frozen);
    return polite_scale(tape, x, 2);
  };
  for (const bool recompute : {false, true}) {
    const Tensor x = input({1});
    tape.watch(x);
    const Tensor y = tape.region(block, [=, this] { return scale(tape, x, 2); }, {recompute});
    Tensor data = input({1});
    const Tensor z = tape.region(inner,
                                 [=, this] {
                                   const Tensor h = scale(tape, y, 3);
                                   use(data);
                                   return h;
                                 },
                                 {recompute});
    EXPECT_EQ(tape.pending_uses(frozen), 1);
    tape.backward(z);
    EXPECT_EQ(tape.pending_uses(frozen), 0) << recompute;
    tape.clear();
  }
}

// What a hook sees as it ends: a unit is reduced once no use of its parameters is pending.
TEST_F(RegionTest, UsesOfOpsThatDoNotRecordEndBeforeTheHookAfterThem) {
  Parameter frozen{.name = "frozen", .shape = {1}, .init = Init::ones(), .trainable = false};
  materialize({&frozen}, memory, 1);
  struct Counting : LoggingHooks {
    using LoggingHooks::LoggingHooks;
    const Parameter* p = nullptr;
    void after_backward(const Block& b, const Tape& tape) override {
      log->push_back(fmt::format("{} {}", b.name, tape.pending_uses(*p)));
    }
  };
  std::vector<std::string> log;
  Counting hooks(&log);
  hooks.p = &frozen;
  const Block last{"last", {&frozen}, &hooks}, first{"first", {}, &hooks};
  for (const bool recompute : {false, true}) {
    log.clear();
    const Tensor x = input({1});
    tape.watch(x);
    // Its last op uses the parameter, for data, and records nothing.
    const auto fn = [=, &frozen, this](const Tensor& in) {
      const Tensor h = scale(tape, in, 3);
      tape.use(frozen);
      return h;
    };
    const Tensor y = tape.region(first, [=, this] { return scale(tape, x, 2); }, {recompute});
    const Tensor z = tape.region(last, [=] { return fn(y); }, {recompute});
    EXPECT_EQ(tape.pending_uses(frozen), 1);
    tape.use(frozen);  // after the last entry
    tape.backward(z);
    EXPECT_EQ(log, (std::vector<std::string>{"+f first", "-f first", "+f last", "-f last",
                                             "+b last", "last 0", "+b first", "first 0"}))
        << recompute;
    EXPECT_EQ(tape.pending_uses(frozen), 0);
    EXPECT_EQ(tape.grad(x).item(), 6);
    tape.clear();
  }
}

TEST_F(RegionTest, WhatHasRunBackwardIsDataAsAreItsParts) {
  for (const bool recompute : {false, true}) {
    const Tensor x = input({1, 2});
    const Tensor y = tape.region(block, [=, this] { return scale(tape, x, 2); }, {recompute});
    EXPECT_THROW(tape.needs_grad(y.slice(1, {1})), InvalidArgument);
    const Tensor loss = tape.empty({}, DType::kF32, "loss");
    tape.record("sum", loss, [y, this](const Tensor&) { fill_zero(tape.grad_target(y).dst); });
    tape.backward(loss);
    EXPECT_FALSE(tape.needs_grad(y));
    EXPECT_FALSE(tape.needs_grad(y.slice(1, {1}))) << recompute;
    EXPECT_FALSE(tape.needs_grad(loss));
  }
}

TEST_F(RegionTest, EntriesAreDescribed) {
  EXPECT_EQ(tape.describe_entries(), "no entries");
  const Tensor x = input({1});
  scale(tape, tape.region(block, [&] { return scale(tape, x, 2); }), 3);
  EXPECT_EQ(tape.describe_entries(),
            "4 entries, the first of region 'h.0', the last of op 'scale'");
}

TEST_F(RegionTest, ASliceOfAWatchedTensorIsRefused) {
  const Tensor both = input({1, 2, 3, 4}), x = both.slice(0, {2}), y = both.slice(2, {2});
  tape.watch(x);
  EXPECT_TRUE(tape.needs_grad(x));
  EXPECT_FALSE(tape.needs_grad(y)) << "beside what is watched";
  for (const Tensor& t : {both, x.slice(1, {1}), both.slice(1, {2})}) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tape.needs_grad(t); }), {"slice", "x"}));
  }
  tape.backward(std::vector<Tensor>{});
  EXPECT_THROW(tape.needs_grad(both), InvalidArgument) << "it is watched still";
  tape.clear();
  EXPECT_FALSE(tape.needs_grad(both));
}

// What launches are for, as listeners learn it.
TEST(Scopes, NameTheRegionAndThePass) {
  struct Listener : LaunchListener {
    std::optional<std::uint64_t> on_enqueue(const LaunchRequest& request) noexcept override {
      seen += std::string(request.work.name) + " " + std::string(request.scope.block) + " " +
              std::string(request.scope.phase) + "\n";
      return std::nullopt;
    }
    void on_launch(const LaunchRecord&) noexcept override {}
    std::string seen;
  } listener;
  const Memory memory;
  const Stream compute = Stream::inline_cpu("compute", {.listener = &listener});
  Tape tape(memory, compute);
  const Block root{"root", {}, nullptr}, plain{"plain", {}, nullptr}, again{"again", {}, nullptr},
      inner{"inner", {}, nullptr};
  const Tensor x = Tensor::from<float>(memory, {1}, std::vector<float>{1}, "x");
  tape.watch(x);
  // y = x
  const auto op = [&](const Tensor& in, const char* name) {
    const bool wanted = tape.needs_grad(in);
    const Tensor out = tape.empty(in.shape(), in.dtype(), "out");
    compute.launch({.name = name}, [] {});
    if (!wanted) return out;
    tape.record(name, out, [&, in, name](const Tensor& dout) {
      compute.launch({.name = name}, [] {});
      tape.pass_grad(in, dout);
    });
    return out;
  };
  const auto forward = [&] {
    return tape.region(root, [&] {
      const Tensor h = tape.region(plain, [&] { return op(op(x, "a"), "b"); });
      const Tensor g = tape.region(
          again, [&, h] { return tape.region(inner, [&, h] { return op(op(h, "c"), "d"); }); },
          {.recompute = true});
      return op(g, "loss");
    });
  };
  const Tensor loss = forward();
  EXPECT_EQ(std::exchange(listener.seen, ""),
            "a plain forward\nb plain forward\nc inner forward\nd inner forward\n"
            "loss root forward\n");
  tape.backward(loss);
  EXPECT_EQ(std::exchange(listener.seen, ""),
            "tape.dloss  \nloss root backward\nc inner recompute\nd inner recompute\n"
            "d inner backward\nc inner backward\nb plain backward\na plain backward\n");
  // An error leaves none behind.
  const Tensor bad = forward();
  EXPECT_EQ(std::exchange(listener.seen, ""),
            "a plain forward\nb plain forward\nc inner forward\nd inner forward\n"
            "loss root forward\n")
      << "after a backward that has recomputed";
  const Tensor end = tape.region(root, [&] {
    const Tensor out = tape.empty(bad.shape(), bad.dtype(), "out");
    tape.record("bad", out, [](const Tensor&) { fail("broken"); });
    return out;
  });
  EXPECT_THROW(tape.backward(end), InvalidArgument);
  listener.seen.clear();
  op(x, "behind");
  EXPECT_EQ(std::exchange(listener.seen, ""), "behind  \n");
  // Nor does one of a region that runs again, and the next forward is none of those.
  bool fails = false;
  tape.watch(x);
  const Tensor out = tape.region(root, [&] {
    return tape.region(again,
                       [&] {
                         const Tensor h = tape.region(inner, [&] { return op(x, "c"); });
                         require(!fails, "broken");
                         return h;
                       },
                       {.recompute = true});
  });
  fails = true;
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tape.backward(out); }), {"broken", "ran again"}));
  listener.seen.clear();
  op(x, "behind");
  tape.watch(x);
  tape.backward(forward());
  EXPECT_EQ(listener.seen,
            "behind  \na plain forward\nb plain forward\nc inner forward\nd inner forward\n"
            "loss root forward\ntape.dloss  \nloss root backward\nc inner recompute\n"
            "d inner recompute\nd inner backward\nc inner backward\nb plain backward\n"
            "a plain backward\n");
}

struct Borders : BorderListener {
  std::vector<std::string> log;
  void on_output(const Block& b, std::size_t index, const Tensor& output,
                 std::string_view phase) override {
    log.push_back(fmt::format("{} {} {} = {}", phase, b.name, index, output.data<float>()[0]));
  }
  void on_output_gradient(const Block& b, std::size_t index, const Tensor& gradient) override {
    log.push_back(fmt::format("d {} {} {} = {}", b.name, index, gradient.shape().str(),
                              gradient.data<float>()[0]));
  }
};

TEST_F(RegionTest, AListenerIsToldWhatCrossesBorders) {
  for (const bool recompute : {false, true}) {
    Borders borders;
    tape.listen(&borders);
    const Tensor x = input({1});
    tape.watch(x);
    const auto two = [x, this] {
      const Tensor h = tape.region(inner, [x, this] { return scale(tape, x, 2); });
      return std::vector<Tensor>{scale(tape, h, 3), scale(tape, h, 5)};
    };
    const std::vector<Tensor> out = tape.region(block, two, {recompute});
    // Of two uses the gradient is told as one, and of what nobody uses none.
    tape.backward(add(tape, scale(tape, out[1], 7), scale(tape, out[1], 1)));
    std::vector<std::string> expected = {"forward h.0.inner 0 = 2", "forward h.0 0 = 6",
                                         "forward h.0 1 = 10", "d h.0 1 (1) = 8"};
    if (recompute) expected.emplace_back("recompute h.0.inner 0 = 2");
    expected.emplace_back("d h.0.inner 0 (1) = 40");
    EXPECT_EQ(borders.log, expected) << recompute;
    borders.log.clear();
    tape.no_grad([&] { return tape.region(block, two); });
    EXPECT_EQ(borders.log, std::vector<std::string>()) << "evaluation";
    tape.listen(nullptr);
    tape.backward(tape.region(block, two)[0]);
    EXPECT_EQ(borders.log, std::vector<std::string>()) << "nobody listens";
    tape.clear();
  }
}

}  // namespace
}  // namespace tessera::engine
