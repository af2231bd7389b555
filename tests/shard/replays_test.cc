// Recomputed regions that use other units again: which bits a step has with them, when those units
// are reduced and updated, and what is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/forwarding_group.h"
#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/hooks/hooks.h"
#include "shard/optimizer/elementwise_optimizer.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/usage_patterns.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/covering.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Block;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using testing::affine;
using testing::borrowed;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::LoggedGroup;
using testing::nested;
using testing::Pattern;
using testing::patterns;
using testing::sum;
using testing::ToyModel;
using testing::ToyRank;
using testing::train_pattern;
using Training = testing::PatternTraining;

// As many as leave no two choices in step.
constexpr std::array kStrategies = {"ddp",           "zero1",        "zero2", "zero3",
                                    "shard_grad_op", "hybrid_zero2", "hfsdp"};
constexpr std::array<std::int64_t, 3> kPackings = {0, 500, 100000};
constexpr int kFreezings = 4;

// Layers that are half frozen, frozen layers, and some of both.
bool freezes(int freezing, std::string_view name) {
  const bool is_weight = name.ends_with("weight"), is_odd = name[2] % 2 == 1;
  switch (freezing) {
    case 1:
      return is_weight;
    case 2:
      return !is_odd;
    case 3:
      return is_odd ? is_weight : name[2] == '2';
    default:
      return false;
  }
}

void set_strategy(Training& run, const char* strategy) {
  run.options.placement = Placement::preset(strategy);
}

// Of four micro-batches in each step.
Training plain(const Pattern& pattern, int ranks, int freezing) {
  Training run{.ranks = ranks,
               .accum = 4 / ranks,
               .steps = 2,
               .num_backwards = pattern.num_backwards,
               .max_norm = 0};
  run.options.placement = Placement::preset("ddp");
  run.freezes = [freezing](const std::string& name) { return freezes(freezing, name); };
  return run;
}

// An evaluation after the last backward is refused there.
bool can_update_in_backward(const Pattern& pattern) {
  return pattern.name != "EvaluationInTheMiddle";
}

UpdateGathers gathers_of(std::size_t number) {
  return number % 2 == 0 ? UpdateGathers::kInterleaved : UpdateGathers::kContiguous;
}

class ReplayPatterns : public ::testing::TestWithParam<std::size_t> {};

// Every pattern with every choice of the others, strategies in turn.
TEST_P(ReplayPatterns, HaveTheBitsOfOneProcess) {
  const Pattern pattern = patterns()[GetParam()];
  std::size_t number = GetParam();
  for (int freezing = 0; freezing < kFreezings; ++freezing) {
    std::vector<std::pair<std::string, Training>> runs = {{"", plain(pattern, 1, freezing)}};
    for (const std::int64_t packing : kPackings) {
      for (const bool recompute : {false, true}) {
        for (const bool updates_in_backward : {false, true}) {
          const char* strategy = kStrategies[number++ % kStrategies.size()];
          if (updates_in_backward && !can_update_in_backward(pattern)) continue;
          if (testing::kIsSlow && number % 5 != 0) continue;
          Training run = plain(pattern, Placement::preset(strategy).is_hybrid() ? 4 : 2, freezing);
          set_strategy(run, strategy);
          run.options.unit_min_numel = packing;
          run.recompute = recompute;
          if (updates_in_backward) run.in_backward = gathers_of(number / 4);
          run.is_async = number % 5 == 0;
          run.poison = !run.is_async;  // which would hide waits
          runs.emplace_back(
              fmt::format("{} freezing {} packing {} recompute {} in backward {}", strategy,
                          freezing, packing, recompute, updates_in_backward),
              run);
        }
      }
    }
    const auto values = testing::concurrently(
        runs, [&](const auto& named) { return train_pattern(named.second, pattern.run); });
    for (std::size_t i = 1; i < runs.size(); ++i) EXPECT_EQ(values[i], values[0]) << runs[i].first;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReplayPatterns, ::testing::Range(std::size_t{0}, patterns().size()),
                         [](const auto& info) { return patterns()[info.param].name; });

// What meets in a covering table.
enum Choice : std::size_t {
  kPattern,
  kStrategy,
  kHook,
  kOffload,
  kPrecision,
  kRecompute,
  kFreezing,
  kPacking,
  kUpdate
};
constexpr std::array kHardPatterns = {"NestedAndRecomputed", "TiedAcrossUnits",
                                      "BorrowedInsideARecomputedRegion", "AroundTheNextBlock",
                                      "LooksAheadInsideARecomputedRegion"};
constexpr std::array kHooks = {"none", "bf16", "powersgd", "bf16+batched_powersgd"};
constexpr std::array<Precision, 3> kPrecisions = {
    Precision{}, Precision{.param = DType::kBF16},
    Precision{DType::kBF16, DType::kF32, DType::kBF16}};
const std::vector<int> kLevels = {int(kHardPatterns.size()),
                                  int(kStrategies.size()),
                                  int(kHooks.size()),
                                  3,
                                  int(kPrecisions.size()),
                                  2,
                                  kFreezings,
                                  int(kPackings.size()),
                                  3};

Training training_of(const testing::CoveringRow& row, const Pattern& pattern) {
  const auto level = [&](Choice choice) { return static_cast<std::size_t>(row[choice]); };
  Training run = plain(pattern, 4, row[kFreezing]);
  set_strategy(run, kStrategies[level(kStrategy)]);
  HookOptions hook;
  set_hook(hook, kHooks[level(kHook)]);
  hook.powersgd.start_step = 1;
  hook.powersgd.low_rank = {.rank = 2, .min_compression_rate = 0};
  run.options.reducer = make_hook(hook);
  run.options.reducer_text = describe(hook);
  run.options.precision = kPrecisions[level(kPrecision)];
  const bool moves = can_offload_parameters(run.options.placement, run.options.precision);
  const double part = 0.5 * row[kOffload];
  run.options.offload = {.parameters = moves ? part : 0, .gradients = part, .optimizer = part};
  run.options.unit_min_numel = kPackings[level(kPacking)];
  run.recompute = row[kRecompute] == 1;
  if (row[kUpdate] > 0) run.in_backward = gathers_of(level(kUpdate));
  return run;
}

// A hook, which sums in an order of its own and may look at whole units, has the bits of the same
// hook under plain data parallelism.
TEST(Replays, HaveTheBitsOfPlainDataParallelismWithHooksAndOffload) {
  const std::vector<Pattern> all = patterns();
  const testing::CoveringRows covering = testing::covering_rows(kLevels);
  EXPECT_TRUE(covering.impossible.empty());
  EXPECT_LT(covering.rows.size(), 60u);
  for (std::size_t number = 0; number < covering.rows.size(); ++number) {
    if (testing::kIsSlow && number % 4 != 0) continue;
    const testing::CoveringRow& row = covering.rows[number];
    const Pattern& pattern = *std::ranges::find(
        all, kHardPatterns[static_cast<std::size_t>(row[kPattern])], &Pattern::name);
    Training run = training_of(row, pattern);
    const std::vector<float> values = train_pattern(run, pattern.run);
    set_strategy(run, "ddp");
    run.options.offload = {};
    run.recompute = false;
    run.in_backward = {};
    EXPECT_EQ(values, train_pattern(run, pattern.run)) << ::testing::PrintToString(row);
  }
}

using Lines = std::vector<std::string>;

struct Rank : ToyRank {
  explicit Rank(ProcessGroup& world, const FsdpOptions& options, bool with_root = true)
      : ToyRank(world, options,
                {.numel = 40,
                 .has_root = with_root,
                 .prepare = [](ToyModel& model) { model.layers[1]->weight.trainable = false; }}),
        has_root(with_root) {}

  void step(const std::function<std::vector<Tensor>(const Tensor&)>& losses, bool in_backward) {
    if (in_backward) sgd.step_in_backward(0.1);
    fsdp.begin_step();
    const Tensor x = input(0.5f);
    const auto all = [&] { return losses(has_root ? affine(tape, x, model.scale, nullptr) : x); };
    tape.backward(has_root ? tape.region(model.root, all) : all());
    fsdp.finish_step();
    if (!in_backward) sgd.step(0.1);
  }

  Tensor layer(const Tensor& x, std::size_t i) {
    return nested(tape, model, x, i, [](const Tensor& y) { return y; });
  }
  // Layer 0, recomputed, which borrows the frozen weight of layer 1.
  Tensor borrower(const Tensor& x) {
    const auto borrow = [this](const Tensor& y) { return borrowed(tape, model, y, 1); };
    return nested(tape, model, x, 0, borrow, /*recompute=*/true);
  }
  // Layer 0, recomputed, and inside it with layer 2 in no_grad().
  std::vector<Tensor> looker(const Tensor& x, const Block& block) {
    return tape.region(block,
                       [x, this] {
                         const Tensor y = borrowed(tape, model, x, 0);
                         const Tensor target =
                             tape.no_grad([&] { return borrowed(tape, model, y, 2); });
                         return std::vector<Tensor>{y, borrowed(tape, model, target, 0)};
                       },
                       {.recompute = true});
  }

  bool has_root;
  Sgd sgd{fsdp, {}};
};

// What the second of two steps sends after its forward.
Lines sent(const std::string& strategy, bool in_backward,
           const std::function<std::vector<Tensor>(Rank&, const Tensor&)>& losses) {
  Lines lines;
  const Placement placement = Placement::preset(strategy);
  const int ranks = placement.is_hybrid() ? 4 : 2;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& all) {
    CollectiveLog log;
    LoggedGroup world(all, log);
    Rank rank(world, {.placement = placement, .prefetch = 0});
    for (int i = 0; i < 2; ++i) {
      rank.step(
          [&](const Tensor& x) {
            std::vector<Tensor> result = losses(rank, x);
            log.take();
            return result;
          },
          in_backward);
    }
    if (world.rank() == 0) lines = log.take();
  });
  return lines;
}

std::vector<Tensor> borrowing(Rank& rank, const Tensor& x) {
  return {sum(rank.tape, rank.layer(rank.layer(rank.borrower(x), 1), 2))};
}

std::vector<Tensor> looking(Rank& rank, const Tensor& x) {
  const std::vector<Tensor> both = rank.looker(x, rank.model.layers[0]->block);
  return {sum(rank.tape, rank.layer(rank.layer(both[0], 1), 2)), sum(rank.tape, both[1])};
}

// A gradient is final after the last use of what is trainable.
TEST(Replays, HoldNoReductionUp) {
  EXPECT_EQ(
      sent("zero3", false, borrowing),
      (Lines{"reduce_scatter h.2 gradient", "all_gather h.1 backward", "all_gather h.1 backward",
             "reduce_scatter h.1 gradient", "all_gather h.0 backward", "all_gather h.1 forward",
             "all_gather h.1 forward", "reduce_scatter h.0 gradient",
             "reduce_scatter root gradient", "all_gather norm", "all_gather root forward"}));
}

TEST(Replays, OfFrozenParametersHoldUpdatesUp) {
  EXPECT_EQ(sent("hfsdp", true, borrowing), (Lines{"reduce_scatter h.2 gradient",
                                                   "broadcast h.2 gradient",
                                                   "broadcast h.2 gradient",
                                                   "all_gather h.2 update",
                                                   "all_gather h.1 backward",
                                                   "all_gather h.1 backward",
                                                   "reduce_scatter h.1 gradient",
                                                   "broadcast h.1 gradient",
                                                   "broadcast h.1 gradient",
                                                   "all_gather h.0 backward",
                                                   "all_gather h.1 forward",
                                                   "all_gather h.1 forward",
                                                   "all_gather h.1 update",
                                                   "reduce_scatter h.0 gradient",
                                                   "broadcast h.0 gradient",
                                                   "broadcast h.0 gradient",
                                                   "all_gather h.0 update",
                                                   "reduce_scatter root gradient",
                                                   "broadcast root gradient",
                                                   "broadcast root gradient",
                                                   "all_gather root update",
                                                   "all_gather root forward",
                                                   "all_gather norm"}));
}

// Until the region that looks has ended.
TEST(Replays, WithoutGradientHoldUpdatesUp) {
  EXPECT_EQ(sent("zero1", true, looking),
            (Lines{"all_reduce h.2 gradient", "all_reduce h.1 gradient", "all_gather h.1 update",
                   "all_reduce h.0 gradient", "all_gather h.2 update", "all_gather h.0 update",
                   "all_reduce root gradient", "all_gather root update", "all_gather norm"}));
}

// A region that no gradient reaches does not run again, and nobody waits for more.
TEST(Replays, ThatDoNotComeHoldUpdatesUpNoLonger) {
  EXPECT_EQ(sent("zero1", true,
                 [](Rank& rank, const Tensor& x) -> std::vector<Tensor> {
                   rank.borrower(rank.layer(x, 2));
                   return {sum(rank.tape, rank.layer(x, 1))};
                 }),
            (Lines{"all_reduce h.1 gradient", "all_reduce h.0 gradient", "all_gather h.1 update",
                   "all_gather h.0 update", "all_reduce h.2 gradient", "all_gather h.2 update",
                   "all_reduce root gradient", "all_gather root update", "all_gather norm"}));
}

// An update that should not come while somebody watches for it.
class Update {
 public:
  void is_made() { made_.set_value(); }
  void watch() {
    came_ = future_.wait_for(std::chrono::milliseconds(100)) == std::future_status::ready;
  }
  bool came_too_early() const { return came_; }

 private:
  std::promise<void> made_;
  std::shared_future<void> future_ = made_.get_future().share();
  std::atomic<bool> came_ = false;
};

// Says when it updates a unit.
class Telling : public ElementwiseOptimizer {
 public:
  Telling(Fsdp& fsdp, std::string unit, Update& told)
      : ElementwiseOptimizer(fsdp, {.name = "telling", .groups = {{.name = "all"}}}),
        unit_(std::move(unit)),
        told_(told) {}
  ~Telling() override { end_updates(); }

 private:
  void update(const Target& target, const Stream& stream) override {
    if (target.unit != unit_) return;
    stream.launch({.name = "tell"}, [&told = told_] { told.is_made(); });
  }
  std::string unit_;
  Update& told_;
};

// The second run of a region computes with what is whole on every rank where it lies.
TEST(Replays, HoldUpdatesUpUntilTheyHaveComputed) {
  auto groups = comm::make_threads_world(1);
  const Stream compute = Stream::worker_cpu("compute");
  const Memory memory(compute);
  Tape tape(memory, compute);
  ToyModel model(3, 40);
  // Without a reduction of its own, which would be waited for.
  model.layers[0]->weight.trainable = model.layers[0]->bias.trainable = false;
  Fsdp fsdp(*groups.front(), memory, compute, model.blocks(), &model.root,
            {.placement = Placement::preset("ddp")});
  Update update;
  Telling optimizer(fsdp, "h.2", update);
  optimizer.step_in_backward(0.1);
  fsdp.begin_step();
  int runs = 0;
  const Tensor x = Tensor::zeros(memory, {40}, DType::kF32);
  tape.backward(tape.region(model.root, [&] {
    const auto look = [&](const Tensor& y) {
      tape.no_grad([&] {
        return tape.region(model.layers[2]->block, [&] {
          if (++runs == 2) compute.launch({.name = "watch"}, [&update] { update.watch(); });
          return y;
        });
      });
      return y;
    };
    const auto nothing = [](const Tensor& y) { return y; };
    Tensor h = affine(tape, x, model.scale, nullptr);
    h = nested(tape, model, h, 0, look, /*recompute=*/true);
    h = nested(tape, model, h, 1, nothing);
    return sum(tape, nested(tape, model, h, 2, nothing));
  }));
  fsdp.finish_step();
  compute.synchronize();
  EXPECT_EQ(runs, 2);
  EXPECT_FALSE(update.came_too_early());
}

// Holds gathers up until told.
class HeldGroup : public comm::ForwardingGroup {
 public:
  HeldGroup(ProcessGroup& inner, std::function<void(const std::string&, const Stream&)> before)
      : ForwardingGroup(inner), before_(std::move(before)) {}
  HeldGroup(std::unique_ptr<ProcessGroup> inner,
            std::function<void(const std::string&, const Stream&)> before)
      : ForwardingGroup(std::move(inner)), before_(std::move(before)) {}
  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<HeldGroup>(inner().split(color, key), before_);
  }

 private:
  void before(const comm::Collective& c, const Stream& stream) override {
    before_(std::string(c.work.detail), stream);
  }
  std::function<void(const std::string&, const Stream&)> before_;
};

// What was gathered ahead for a region that no gradient reaches reads what is to be updated.
TEST(Replays, ThatDoNotComeHoldUpdatesUpUntilTheirGatherIsDone) {
  comm::run_ranks(2, {}, [](ProcessGroup& all) {
    Update update;
    bool is_in_backward = false;
    int held = 0;
    HeldGroup world(all, [&](const std::string& detail, const Stream& stream) {
      if (!is_in_backward || detail != "h.1 forward") return;
      if (++held == 1) stream.launch({.name = "watch"}, [&update] { update.watch(); });
    });
    Rank rank(world, {.prefetch = 2});
    Telling optimizer(rank.fsdp, "h.1", update);
    optimizer.step_in_backward(0.1);
    rank.fsdp.begin_step();
    const Tensor x = Tensor::zeros(rank.memory, {40}, DType::kF32);
    const Tensor loss = rank.tape.region(rank.model.root, [&] {
      const Tensor h = rank.layer(affine(rank.tape, x, rank.model.scale, nullptr), 2);
      rank.borrower(h);
      return sum(rank.tape, rank.layer(h, 1));
    });
    is_in_backward = true;
    rank.tape.backward(loss);
    rank.fsdp.finish_step();
    rank.fsdp.synchronize();
    EXPECT_GT(held, 0);
    EXPECT_FALSE(update.came_too_early());
  });
}

// A region of no unit runs again while no unit is open: that begins no other backward.
TEST(Replays, AreNoForwards) {
  const auto norm_of = [](bool recompute) {
    auto groups = comm::make_threads_world(1);
    Rank rank(*groups.front(), {}, /*with_root=*/false);
    const Block span{"span", {}};
    const Tensor x = rank.input(0.5f);
    rank.fsdp.begin_step(1, {.num_backwards = 2});
    for (int i = 0; i < 2; ++i) {
      Tensor h = x;
      for (const std::size_t layer : {0, 1, 2}) {
        h = rank.tape.region(span, [h, layer, &rank] { return rank.layer(h, layer); },
                             {.recompute = recompute});
      }
      rank.tape.backward(sum(rank.tape, h));
    }
    return rank.fsdp.finish_step().value();
  };
  const float expected = norm_of(false);
  EXPECT_GT(expected, 0);
  EXPECT_EQ(norm_of(true), expected);
}

// Nothing tells such a use from an evaluation.
TEST(Replays, WithoutGradientInRegionsThatAreNotWrappedAreRefused) {
  auto groups = comm::make_threads_world(1);
  Rank rank(*groups.front(), {}, /*with_root=*/false);
  const Block span{"span", {}};
  const auto losses = [&](const Tensor& x) {
    const Tensor y = rank.looker(rank.layer(x, 1), span)[1];
    return std::vector<Tensor>{sum(rank.tape, rank.layer(y, 2))};
  };
  rank.step(losses, /*in_backward=*/false);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.step(losses, /*in_backward=*/true); }),
                  {"expected finish_step()", "a forward of 'h.2'",
                   "give Fsdp the block of a recomputed region"}));
}

}  // namespace
}  // namespace tessera::shard
