// Optimizers against closed forms in double.
#include "shard/optimizer/optimizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/adamw_rule.h"
#include "shard/optimizer/elementwise_optimizer.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using engine::Tensor;

// Runs `steps` updates with a given gradient of `scale` (dy/dscale of a toy model of no blocks is
// 2 x scale) and returns the parameter after each, and its gradients.
struct Trace {
  std::vector<double> parameter, gradient;
};

Trace trace(const std::function<std::unique_ptr<Optimizer>(Fsdp&)>& make, int steps, double lr,
            double clip, const engine::Shape& shape) {
  Trace result;
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    const auto compute = engine::Stream::inline_cpu("compute");
    engine::Tape tape(memory, compute);
    testing::ToyModel model(0, 1);
    model.scale.shape = shape;
    Fsdp fsdp(world, memory, compute, {}, &model.root, {});
    const auto optimizer = make(fsdp);
    fsdp.load(model.scale, std::vector<float>{1.5f});
    fsdp.parameters_changed();
    for (int i = 0; i < steps; ++i) {
      const float before = fsdp.full_parameter(model.scale)[0];
      const float x = 0.3f + 0.1f * static_cast<float>(i);
      fsdp.begin_step();
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {1}, std::vector<float>{x}, "x")));
      fsdp.finish_step();
      optimizer->step(lr, ClipFactor{clip});
      result.gradient.push_back(2.0 * x * before);
      result.parameter.push_back(fsdp.full_parameter(model.scale)[0]);
    }
  });
  return result;
}

TEST(Sgd, FollowsItsFormula) {
  const auto t =
      trace([](Fsdp& f) { return std::make_unique<Sgd>(f, SgdOptions{.momentum = 0.9}); }, 10, 0.01,
            0.5, {1});
  double p = 1.5, v = 0;
  for (std::size_t i = 0; i < t.parameter.size(); ++i) {
    v = 0.9 * v + 0.5 * t.gradient[i];
    p -= 0.01 * v;
    EXPECT_NEAR(t.parameter[i], p, 1e-6);
  }
}

TEST(AdamW, FollowsItsFormulaAndDecaysOnlyMatrices) {
  for (const bool is_matrix : {true, false}) {
    for (const double eps : {1e-6, 0.7}) {  // of no account, and as large as the gradients
      for (const double clip : {1.0, 0.25}) {
        const auto t = trace(
            [=](Fsdp& f) {
              return std::make_unique<AdamW>(
                  f, AdamWOptions{.beta1 = 0.8, .beta2 = 0.9, .eps = eps, .weight_decay = 0.3});
            },
            10, 0.05, clip, is_matrix ? engine::Shape{1, 1} : engine::Shape{1});
        double p = 1.5, m = 0, v = 0;
        for (std::size_t i = 0; i < t.parameter.size(); ++i) {
          const double g = clip * t.gradient[i], n = static_cast<double>(i + 1);
          m = 0.8 * m + 0.2 * g;
          v = 0.9 * v + 0.1 * g * g;
          if (is_matrix) p -= 0.05 * 0.3 * p;
          p -= 0.05 * (m / (1 - std::pow(0.8, n))) / (std::sqrt(v / (1 - std::pow(0.9, n))) + eps);
          EXPECT_NEAR(t.parameter[i], p, 2e-6) << "eps " << eps << " clip " << clip;
        }
      }
    }
  }
}

// The values that docs/embedding.md says.
TEST(AdamW, HasTheDefaultsOfLanguageModels) {
  const AdamWOptions options;
  EXPECT_EQ(options.beta1, 0.9);
  EXPECT_EQ(options.beta2, 0.95);
  EXPECT_EQ(options.eps, 1e-8);
  EXPECT_EQ(options.weight_decay, 0.1);
  for (const bool is_matrix : {true, false}) {
    const auto t = trace([](Fsdp& f) { return std::make_unique<AdamW>(f, AdamWOptions{}); }, 10,
                         0.05, 1, is_matrix ? engine::Shape{1, 1} : engine::Shape{1});
    double p = 1.5, m = 0, v = 0;
    for (std::size_t i = 0; i < t.parameter.size(); ++i) {
      const double g = t.gradient[i], n = static_cast<double>(i + 1);
      m = 0.9 * m + 0.1 * g;
      v = 0.95 * v + 0.05 * g * g;
      if (is_matrix) p -= 0.05 * 0.1 * p;
      p -= 0.05 * (m / (1 - std::pow(0.9, n))) / (std::sqrt(v / (1 - std::pow(0.95, n))) + 1e-8);
      EXPECT_NEAR(t.parameter[i], p, 2e-6) << (is_matrix ? "a matrix" : "a vector");
    }
  }
}

TEST(Power, IsThatOfThePowersOfTwoAndAsCloseAsDoublesAreElsewhere) {
  EXPECT_EQ(power(0.5, 0), 1);
  EXPECT_EQ(power(0.5, 1), 0.5);
  EXPECT_EQ(power(0.5, 1022), 0x1p-1022);
  EXPECT_EQ(power(2, 1023), 0x1p1023);
  for (const double x : {0.8, 0.9, 0.95, 0.999, 0.9999}) {
    for (const std::int64_t n : {1, 2, 3, 7, 8, 100, 4095, 4096, 100'000}) {
      const double exact = std::pow(x, static_cast<double>(n));
      EXPECT_NEAR(power(x, n), exact, 1e-16 * static_cast<double>(n + 1) * exact) << x << " " << n;
    }
  }
  EXPECT_EQ(power(0.9, std::int64_t{1} << 40), 0);
}

TEST(ClipScale, IsTorchs) {
  EXPECT_EQ(clip_scale(0.5f, 1), 1);
  EXPECT_EQ(clip_scale(100, 0), 1);
  EXPECT_DOUBLE_EQ(clip_scale(4, 1), 1 / (4 + 1e-6));
}

TEST(Options, OutOfRangeIsRefused) {
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    testing::ToyModel model(1, 1);
    Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), model.blocks(), &model.root,
              {});
    EXPECT_THROW(Sgd(fsdp, {.momentum = 1}), engine::InvalidArgument);
    EXPECT_THROW(AdamW(fsdp, {.beta1 = -0.1}), engine::InvalidArgument);
    EXPECT_THROW(AdamW(fsdp, {.eps = 0}), engine::InvalidArgument);
  });
}

// The clipping factor has a type: the norm of the gradient is no factor.
template <class Norm>
concept IsFactor = requires(Optimizer& optimizer, const Norm& norm) {
  optimizer.step(0.1, norm);
};
static_assert(!IsFactor<GradNorm> && !IsFactor<double> && IsFactor<ClipFactor>);
static_assert(!std::is_convertible_v<GradNorm, float>);

// One rank with three blocks of a vector and a matrix each.
struct Rank : testing::ToyRank {
  Rank(comm::ProcessGroup& world, const char* strategy)
      : ToyRank(world, {.placement = Placement::preset(strategy)},
                {.poison = false, .prepare = [](testing::ToyModel& model) {
                   for (const auto& layer : model.layers) layer->weight.shape = {13, 10};
                 }}) {}
  GradNorm gradients() {
    fsdp.begin_step();
    tape.backward(loss(0.5f));
    return fsdp.finish_step();
  }
};

constexpr const char* kStrategies[] = {"ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"};

TEST(Groups, HaveTheirOwnLearningRateAndDecay) {
  std::vector<float> expected;
  for (const char* strategy : kStrategies) {
    comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) {
      Rank rank(world, strategy);
      AdamW optimizer(rank.fsdp,
                      {.weight_decay = 0.3,
                       .groups = {{.name = "frozen", .parameters = {"h.0.weight"}, .lr_scale = 0},
                                  {.name = "fast",
                                   .parameters = {"h.1.weight", "h.1.bias"},
                                   .lr_scale = 10,
                                   .weight_decay = 0.7}}});
      std::vector<std::vector<float>> before;
      const std::vector<const engine::Parameter*> parameters = {
          &rank.model.layers[0]->weight, &rank.model.layers[0]->bias, &rank.model.layers[1]->weight,
          &rank.model.layers[1]->bias, &rank.model.layers[2]->weight};
      for (const auto* p : parameters) before.push_back(rank.fsdp.full_parameter(*p));
      const GradNorm norm = rank.gradients();
      std::vector<std::vector<float>> gradient;
      for (const auto* p : parameters) gradient.push_back(rank.fsdp.full_gradient(*p));
      optimizer.step(0.01, norm, 0);
      const double lr[] = {0, 0.01, 0.1, 0.1, 0.01}, decay[] = {0, 0, 0.7, 0.7, 0.3};
      std::vector<float> all;
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const std::vector<float> after = rank.fsdp.full_parameter(*parameters[i]);
        for (std::size_t k = 0; k < after.size(); ++k) {
          // In the first step the moments are the gradient and its square.
          const double g = gradient[i][k];
          const double p =
              before[i][k] * (1 - lr[i] * decay[i]) - lr[i] * g / (std::sqrt(g * g) + 1e-8);
          ASSERT_NEAR(after[k], p, 1e-5) << strategy << " " << parameters[i]->name;
        }
        all.insert(all.end(), after.begin(), after.end());
      }
      if (world.rank() != 0) return;
      if (expected.empty()) expected = all;
      EXPECT_EQ(all, expected) << strategy;
    });
  }
}

// A layer-wise learning rate of a deep model: each parameter has a group of its own.
TEST(Groups, AreAsManyAsAModelHasParameters) {
  constexpr int kBlocks = 100;
  constexpr std::int64_t kNumel = 66;
  // By parameter: values and moments after three updates.
  const auto train = [](int ranks, const std::string& strategy) {
    std::vector<std::vector<float>> result;
    comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
      const engine::Memory memory;
      const auto compute = engine::Stream::inline_cpu("compute");
      engine::Tape tape(memory, compute);
      testing::ToyModel model(kBlocks, kNumel);
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
                {.placement = Placement::preset(strategy)});
      AdamW optimizer(fsdp, {.groups = testing::groups_of(model)});
      ASSERT_EQ(optimizer.groups().size(), 2u + 2 * kBlocks);
      for (int step = 0; step < 3; ++step) {
        if (step == 2) optimizer.group("group 130").lr_scale = 0;
        const std::vector<float> kept = fsdp.full_parameter(model.layers[65]->weight);
        for (int micro = 0; micro < 4 / ranks; ++micro) {
          micro == 0 ? fsdp.begin_step(4 / ranks) : fsdp.next_micro_step();
          const auto number = static_cast<float>(micro * ranks + world.rank() + step);
          tape.backward(model.loss(
              tape, Tensor::from<float>(memory, {kNumel}, std::vector<float>(kNumel, 0.1f * number),
                                        "x")));
        }
        fsdp.finish_step();
        std::vector<std::vector<float>> before, gradients;
        for (const auto& layer : model.layers) {
          for (const engine::Parameter* p : {&layer->weight, &layer->bias}) {
            before.push_back(fsdp.full_parameter(*p));
            gradients.push_back(fsdp.full_gradient(*p));
          }
        }
        optimizer.step(0.01);
        if (step == 2) {
          EXPECT_EQ(fsdp.full_parameter(model.layers[65]->weight), kept);
        }
        if (step > 0) continue;
        // In the first step the moments are the gradient and its square.
        for (std::size_t g = 0; g < 2 * kBlocks; ++g) {
          const auto& layer = *model.layers[g / 2];
          const auto after = fsdp.full_parameter(g % 2 == 0 ? layer.weight : layer.bias);
          const double lr = 0.01 * (1 + 0.1 * static_cast<double>(g));
          const double decay = 1 / (1 + static_cast<double>(g));
          for (std::size_t k = 0; k < after.size(); ++k) {
            const double gradient = gradients[g][k];
            const double want =
                before[g][k] * (1 - lr * decay) - lr * gradient / (std::abs(gradient) + 1e-8);
            ASSERT_NEAR(after[k], want, 1e-5 * (1 + std::abs(want))) << "group " << g;
          }
        }
      }
      std::vector<std::vector<float>> mine;
      for (const engine::Parameter* p : fsdp.parameters()) {
        mine.push_back(fsdp.full_parameter(*p));
        for (const char* state : {"m", "v"}) mine.push_back(optimizer.full_state(*p, state));
      }
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const auto expected = train(1, "ddp");
  for (const std::string& strategy : Placement::preset_names()) {
    EXPECT_EQ(train(4, strategy), expected) << strategy;
  }
}

TEST(Groups, ThatDoNotFitAreRefusedByName) {
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    Rank rank(world, "zero3");
    const auto error = [&](std::vector<ParameterGroup> groups) {
      return testing::error_of<engine::InvalidArgument>(
          [&] { AdamW(rank.fsdp, {.groups = std::move(groups)}); });
    };
    using testing::has;
    EXPECT_TRUE(has(error({{.name = "a", .parameters = {"h.9.bias"}}}), {"h.9.bias", "'a'"}));
    EXPECT_TRUE(has(error({{.name = "a", .parameters = {"h.0.bias"}},
                           {.name = "b", .parameters = {"h.0.bias"}}}),
                    {"h.0.bias", "'a'", "'b'"}));
    EXPECT_TRUE(has(error({{.name = "matrices"}}), {"'matrices'"}));
    EXPECT_TRUE(has(error({{.name = "a", .weight_decay = -1}}), {"-1", "a"}));
    std::vector<ParameterGroup> many;
    for (std::size_t g = 0; g < kMaxGroups - 2; ++g) many.push_back({.name = std::to_string(g)});
    EXPECT_NO_THROW(AdamW(rank.fsdp, {.groups = many}));
    many.push_back({.name = "one too many"});
    EXPECT_TRUE(has(error(many), {"65536", "65537", "'one too many'"}));
    AdamW optimizer(rank.fsdp, {.groups = {{.name = "head", .parameters = {"h.2.bias"}}}});
    optimizer.group("head").lr_scale = 2;
    EXPECT_TRUE(has(testing::error_of<engine::InvalidArgument>([&] { optimizer.group("tail"); }),
                    {"matrices, vectors, head", "'tail'"}));
    EXPECT_TRUE(has(testing::error_of<engine::InvalidArgument>([&] { optimizer.repeat_step(1); }),
                    {"captured step", "cpu"}));
    EXPECT_TRUE(has(testing::error_of<engine::InvalidArgument>(
                        [&] { Sgd(rank.fsdp, {.groups = {{.name = "a", .weight_decay = 0.1}}}); }),
                    {"weight decay", "'a'"}));
  });
}

// Written outside the library and without a rule: sees names, shapes and groups of what it updates.
// p -= lr x the mean gradient, as Sgd.
class SeesParameters : public ElementwiseOptimizer {
 public:
  using Seen = std::map<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>>;

  explicit SeesParameters(Fsdp& fsdp)
      : ElementwiseOptimizer(
            fsdp, {.groups = {{.name = "all"}, {.name = "h.1", .parameters = {"h.1.weight"}}}}) {}
  ~SeesParameters() override { end_updates(); }

  Seen seen;  // "name shape group": ranges

 private:
  void prepare_parts(const Step& step, const HostPart*) override { step_ = step; }
  void update(const Target& target, const engine::Stream& stream) override {
    for (const Segment& s : target.segments) {
      const engine::Parameter& p = *target.flat.parameters[s.parameter];
      const auto group = static_cast<std::size_t>((*target.groups)[s.parameter]);
      seen[fmt::format("{} {} {}", p.name, p.shape, groups()[group].name)].emplace_back(
          s.parameter_begin, s.parameter_begin + s.numel);
      EXPECT_EQ(target.flat.layout.numel(s.parameter), p.shape.numel());
    }
    stream.launch({.name = "sgd"},
                  [lr = static_cast<float>(step_.lr), scale = static_cast<float>(step_.mean_scale),
                   p = target.master, g = target.grad_sum, segments = target.segments] {
                    for (const Segment& s : segments) {
                      for (std::int64_t i = s.shard_begin; i < s.shard_begin + s.numel; ++i) {
                        p.data<float>()[i] -= lr * (g.data<float>()[i] * scale);
                      }
                    }
                  });
  }

  Step step_;
};

TEST(Elementwise, SeesEachParameterWithShapeAndGroup) {
  for (const char* strategy : kStrategies) {
    for (const bool in_backward : {false, true}) {
      SeesParameters::Seen all;
      std::mutex mutex;
      comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) {
        Rank rank(world, strategy), expected(world, strategy);
        SeesParameters optimizer(rank.fsdp);
        Sgd sgd(expected.fsdp, {});
        if (in_backward) optimizer.step_in_backward(0.1);
        rank.gradients();
        if (!in_backward) optimizer.step(0.1);
        expected.gradients();
        sgd.step(0.1);
        EXPECT_EQ(rank.values(), expected.values()) << strategy << ", in backward " << in_backward;
        const std::lock_guard lock(mutex);
        for (const auto& [name, ranges] : optimizer.seen) {
          all[name].insert(all[name].end(), ranges.begin(), ranges.end());
        }
      });
      std::set<std::string> names;
      for (auto& [name, ranges] : all) {
        names.insert(name);
        std::ranges::sort(ranges);
        std::int64_t next = 0;  // first element that no range has
        for (const auto& [begin, end] : ranges) {
          EXPECT_LE(begin, next) << strategy << " " << name;
          next = std::max(next, end);
        }
        EXPECT_EQ(next, 130) << strategy << " " << name;
      }
      EXPECT_EQ(names, (std::set<std::string>{"h.0.bias (130) all", "h.0.weight (13, 10) all",
                                              "h.1.bias (130) all", "h.1.weight (13, 10) h.1",
                                              "h.2.bias (130) all", "h.2.weight (13, 10) all",
                                              "scale (130) all"}))
          << strategy;
    }
  }
}

// What an optimizer knows goes from any strategy to any other, by parameter.
TEST(State, MovesBetweenStrategies) {
  for (const char* from : kStrategies) {
    for (const char* to : {"ddp", "zero3", "hfsdp"}) {
      comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) {
        Rank a(world, from), b(world, to);
        AdamW one(a.fsdp, {}), other(b.fsdp, {});
        for (int i = 0; i < 2; ++i) one.step(0.01, a.gradients(), 1);
        for (const engine::Parameter* p : a.fsdp.parameters()) {
          const auto all = b.fsdp.parameters();
          const auto q = std::ranges::find(all, p->name, &engine::Parameter::name);
          b.fsdp.load(**q, a.fsdp.full_parameter(*p));
          for (const std::string& name : one.state_names()) {
            other.load_state(**q, name, one.full_state(*p, name));
          }
        }
        b.fsdp.parameters_changed();
        other.set_num_steps(one.num_steps());
        one.step(0.01, a.gradients(), 1);
        other.step(0.01, b.gradients(), 1);
        EXPECT_EQ(one.num_steps(), 3);
        EXPECT_EQ(a.fsdp.full_parameter(a.model.layers[1]->weight),
                  b.fsdp.full_parameter(b.model.layers[1]->weight))
            << from << " to " << to;
        EXPECT_TRUE(testing::has(
            testing::error_of<engine::InvalidArgument>([&] { one.full_state(a.model.scale, "w"); }),
            {"m, v", "'w'"}));
      });
    }
  }
}

TEST(Steps, AreRefusedOutOfOrder) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    Rank rank(world, "zero3");
    Sgd optimizer(rank.fsdp, {});
    using testing::has;
    const auto error = [](const std::function<void()>& fn) {
      return testing::error_of<engine::InvalidArgument>(fn);
    };
    EXPECT_TRUE(has(error([&] { optimizer.step(0.1); }), {"finish_step"}));
    for (const double max_norm : {-1.0, std::nan("")}) {
      const GradNorm norm = rank.gradients();
      EXPECT_TRUE(has(error([&] { optimizer.step(0.1, norm, max_norm); }),
                      {"expected a max_norm of at least 0", "0: no clipping"}));
    }
    rank.gradients();
    optimizer.step(0.1);
    EXPECT_TRUE(has(error([&] { optimizer.step(0.1); }), {"finish_step"})) << "used already";
    rank.gradients();
    optimizer.begin_step(0.1, ClipFactor{});
    optimizer.step_unit(*rank.fsdp.units()[0], rank.compute);
    EXPECT_TRUE(has(error([&] { optimizer.step_unit(*rank.fsdp.units()[0], rank.compute); }),
                    {"two", "h.0"}));
    EXPECT_TRUE(has(error([&] { optimizer.end_step(); }), {"h.1"}));
  });
}

// Units may be updated one by one, in any order.
TEST(Steps, InPartsAreTheWhole) {
  std::vector<float> whole, parts;
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    Rank a(world, "zero3"), b(world, "zero3");
    AdamW one(a.fsdp, {}), other(b.fsdp, {});
    for (int i = 0; i < 3; ++i) {
      one.step(0.01, a.gradients(), 1);
      const GradNorm norm = b.gradients();
      other.begin_step(0.01, norm, 1);
      for (const auto& unit : b.fsdp.units()) other.step_unit(*unit, b.compute);
      other.end_step();
    }
    EXPECT_EQ(a.fsdp.full_parameter(a.model.layers[2]->weight),
              b.fsdp.full_parameter(b.model.layers[2]->weight));
  });
}

}  // namespace
}  // namespace tessera::shard
