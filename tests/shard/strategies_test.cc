// Every strategy: the same bits as one process, and the collectives, bytes and memory that define
// it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Category;
using engine::DType;
using engine::Memory;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::LoggedGroup;
using testing::ToyModel;
using testing::train;
using testing::Training;

// A strategy on some number of ranks.
struct Strategy {
  std::string name;
  int shard_ranks;    // 0: the strategy's own
  int reshard_ranks;  // 0: what the strategy says
  bool cuts_optimizer_over_world = false;

  std::string str() const {
    return name + " shard_ranks " + std::to_string(shard_ranks) + " reshard_ranks " +
           std::to_string(reshard_ranks) + (cuts_optimizer_over_world ? " optimizer=world" : "");
  }
  void apply(FsdpOptions& options) const {
    options.placement = Placement::preset(name);
    options.placement.reshard_ranks = reshard_ranks;
    if (cuts_optimizer_over_world) options.placement.optimizer = Place::kWorld;
    if (shard_ranks != 0) options.placement.shard_ranks = shard_ranks;
  }
};

// All of them, with every shard_ranks from 1 to all and every reshard_ranks that there can be.
std::vector<Strategy> strategies(int ranks) {
  std::vector<Strategy> all;
  for (const std::string& name : Placement::preset_names()) {
    if (name == "full_shard" || name == "fsdp") continue;
    const bool is_hybrid = Placement::preset(name).is_hybrid();
    if (!is_hybrid) all.push_back({name, 0, 0});
    for (int k = 1; k <= ranks; ++k) {
      if (ranks % k == 0 && is_hybrid) all.push_back({name, k, 0});
      if (ranks % k == 0 && name == "zero3") all.push_back({name, 0, k});
    }
  }
  if (ranks % 4 == 0) all.push_back({"hsdp", ranks / 2, ranks / 4});
  // What no preset says: whole gradients, and a state cut inside replicas; whole parameters, or
  // those that forward leaves gathered, and a state cut over all ranks.
  if (ranks % 2 == 0) all.push_back({"zero1", ranks / 2, 0});
  for (const char* name : {"zero1", "zero2", "shard_grad_op"}) {
    for (int k = 1; k <= ranks; ++k)
      if (ranks % k == 0) all.push_back({name, k, 0, true});
  }
  return all;
}

// One process that accumulates the same micro-batches, with nothing cut.
const std::vector<float>& one_process(Training run, int micro_batches) {
  static std::map<std::tuple<int, int, int, int, int, bool, bool>, std::vector<float>> known;
  const Precision& p = run.options.precision;
  auto& result = known[{micro_batches, int(p.param), int(p.reduce), int(p.accumulate), run.rounds,
                        run.adamw, run.max_norm > 0}];
  if (result.empty()) {
    run.ranks = 1;
    run.accum = micro_batches;
    run.options = {.placement = Placement::preset("ddp"), .precision = p};
    run.recompute = run.poison = false;
    run.delay_seed = 0;
    result = train(run);
  }
  return result;
}

// How many choices of options each strategy meets; sanitizers take ten times as long.
constexpr int kTurns = testing::kIsSlow ? 1 : 6;

class Bits : public ::testing::TestWithParam<int> {};

// Options take turns, so that every strategy meets every value of every option, and most pairs.
TEST_P(Bits, OfEveryStrategyAreThoseOfOneProcess) {
  constexpr int kMicroBatches = 24;
  const int ranks = GetParam();
  const Precision precisions[] = {{},
                                  {.param = DType::kBF16},
                                  {DType::kBF16, DType::kBF16, DType::kF32},
                                  {DType::kBF16, DType::kF32, DType::kBF16}};
  int turn = ranks;
  std::vector<std::pair<std::string, Training>> runs;
  for (const Strategy& strategy : strategies(ranks)) {
    for (int i = 0; i < kTurns; ++i, ++turn) {
      Training run{.ranks = ranks, .accum = kMicroBatches / ranks, .steps = 2};
      strategy.apply(run.options);
      run.options.prefetch = turn % 4;
      run.options.reductions_in_flight = turn / 2 % 3;
      run.options.unit_min_numel = turn % 5 == 0 ? 1000 : 0;
      run.options.precision = precisions[turn % 7 % 4];
      run.adamw = turn % 2 == 0;
      run.max_norm = turn / 3 % 2 == 0 ? 5 : 0;
      run.rounds = 1 + turn / 4 % 2;
      run.recompute = turn / 5 % 2 == 0;
      run.poison = turn / 2 % 2 == 0;
      run.delay_seed = turn % 6 == 0 ? 1 + static_cast<std::uint64_t>(turn) : 0;
      runs.emplace_back(strategy.str() + " turn " + std::to_string(turn), run);
    }
  }
  const auto values =
      testing::concurrently(runs, [](const auto& named) { return train(named.second); });
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& [name, run] = runs[i];
    ASSERT_EQ(values[i], one_process(run, kMicroBatches)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Bits, ::testing::Values(1, 2, 3, 4, 6, 8));

TEST(Bits, WithoutSyncEveryStrategyEqualsEveryOther) {
  Training run{.ranks = 4, .accum = 3, .steps = 2, .no_sync = true};
  run.options.placement = Placement::preset("ddp");
  const std::vector<float> expected = train(run);
  EXPECT_NE(expected, one_process({.steps = 2}, 12)) << "an order of its own";
  for (const Strategy& strategy : strategies(4)) {
    strategy.apply(run.options);
    EXPECT_EQ(train(run), expected) << strategy.str();
  }
}

// Says that it does not sum in the order of ranks, as NCCL's own order does not.
class AnyOrderGroup : public LoggedGroup {
 public:
  using LoggedGroup::LoggedGroup;
  bool sums_in_rank_order() const override { return false; }
  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<AnyOrderGroup>(LoggedGroup::make_part(color, key), unread_);
  }

 private:
  CollectiveLog unread_;  // of what is split from it, which it outlives
};

// The gradients of a step of two micro-steps, of which the last runs the layers `last_rounds`
// times.
std::vector<float> gradients_of(const char* strategy, bool any_order, int last_rounds) {
  std::vector<float> result;
  comm::run_ranks(4, {}, [&](ProcessGroup& world) {
    CollectiveLog log;
    AnyOrderGroup group(world, log);
    const Memory memory({.poison = true});
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    ToyModel model(2, 300);
    Fsdp fsdp(any_order ? static_cast<ProcessGroup&>(group) : world, memory, compute,
              model.blocks(), &model.root, {.placement = Placement::preset(strategy)});
    const Tensor x = Tensor::from<float>(
        memory, {300}, std::vector<float>(300, 1.0f + static_cast<float>(world.rank())), "x");
    for (int step = 0; step < 2; ++step) {
      fsdp.begin_step(2);
      tape.backward(model.loss(tape, x));
      fsdp.next_micro_step();
      tape.backward(model.loss(tape, x, /*recompute=*/false, last_rounds));
      fsdp.finish_step();
    }
    std::vector<float> mine;
    for (const engine::Parameter* p : fsdp.parameters()) {
      const std::vector<float> g = fsdp.full_gradient(*p);
      mine.insert(mine.end(), g.begin(), g.end());
    }
    if (world.rank() == 0) result = mine;
  });
  return result;
}

// Replicas sum on their own then, and across once in a step: also what the last micro-step did not
// reach. The sums are of the same 8 numbers in another order.
TEST(Replicas, ThatSumOnTheirOwnEndWithTheSumOfAll) {
  for (const char* strategy : {"hsdp", "hybrid_zero2", "hfsdp"}) {
    for (const int last_rounds : {1, 0}) {
      const std::vector<float> expected = gradients_of(strategy, false, last_rounds);
      const std::vector<float> got = gradients_of(strategy, true, last_rounds);
      ASSERT_EQ(got.size(), expected.size());
      const float largest = std::ranges::max(expected);
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], expected[i], 2 * 7 * 6e-8 * largest) << strategy << " " << last_rounds;
      }
    }
  }
}

// Collectives
// ------------------------------------------------------------------------------------

// Those of one step with its update in the steady state, from the first gather after the update
// before.
std::vector<CollectiveLog::Record> step_of(const Strategy& strategy, int ranks,
                                           const Precision& precision = {}) {
  std::vector<CollectiveLog::Record> records;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    ToyModel model(3, 300);
    FsdpOptions options{.precision = precision};
    strategy.apply(options);
    Fsdp fsdp(group, memory, compute, model.blocks(), &model.root, options);
    AdamW optimizer(fsdp, {});
    for (int step = 0; step < 3; ++step) {
      fsdp.begin_step();
      tape.backward(model.loss(tape, Tensor::zeros(memory, {300}, DType::kF32)));
      const GradNorm norm = fsdp.finish_step();
      if (step == 2) break;
      log.take();
      optimizer.step(1e-3, norm, 1);
    }
    fsdp.synchronize();
    if (world.rank() == 0) records = log.records();
  });
  return records;
}

std::vector<std::string> lines_of(const Strategy& strategy, int ranks) {
  std::vector<std::string> lines;
  for (const CollectiveLog::Record& record : step_of(strategy, ranks)) lines.push_back(record.text);
  return lines;
}

using Lines = std::vector<std::string>;

TEST(Order, DdpReducesAfterBackward) {
  EXPECT_EQ(lines_of({"ddp", 0, 0}, 2),
            (Lines{"all_reduce h.2 gradient", "all_reduce h.1 gradient", "all_reduce h.0 gradient",
                   "all_reduce root gradient"}));
}

// The root's update first: its gather runs during the others' updates.
const Lines kUpdates = {"all_gather root update", "all_gather h.0 update", "all_gather h.1 update",
                        "all_gather h.2 update"};

Lines joined(Lines a, const Lines& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(Order, Zero1GathersWhatItUpdated) {
  EXPECT_EQ(
      lines_of({"zero1", 0, 0}, 2),
      joined(kUpdates, {"all_reduce h.2 gradient", "all_reduce h.1 gradient",
                        "all_reduce h.0 gradient", "all_reduce root gradient", "all_gather norm"}));
}

const Lines kScatters = {"reduce_scatter h.2 gradient", "reduce_scatter h.1 gradient",
                         "reduce_scatter h.0 gradient", "reduce_scatter root gradient",
                         "all_gather norm"};

TEST(Order, Zero2ReducesToShards) {
  EXPECT_EQ(lines_of({"zero2", 0, 0}, 2), joined(kUpdates, kScatters));
}

// Two units ahead of a forward are gathered while the optimizer is at work: the root and h.0.
const Lines kForward = {"all_gather root forward", "all_gather h.0 forward",
                        "all_gather h.1 forward", "all_gather h.2 forward"};
const Lines kBackward = {"all_gather h.1 backward",
                         "reduce_scatter h.2 gradient",
                         "all_gather h.0 backward",
                         "reduce_scatter h.1 gradient",
                         "reduce_scatter h.0 gradient",
                         "reduce_scatter root gradient",
                         "all_gather norm"};

TEST(Order, Zero3GathersTwice) {
  EXPECT_EQ(lines_of({"zero3", 0, 0}, 2), joined(kForward, kBackward));
  EXPECT_EQ(lines_of({"zero3", 0, 2}, 4), joined(kForward, kBackward));
}

TEST(Order, ShardGradOpGathersOnce) {
  EXPECT_EQ(lines_of({"shard_grad_op", 0, 0}, 2), joined(kForward, kScatters));
}

// Two replicas take turns: rank 0 is of the first.
Lines in_turns(const Lines& lines) {
  Lines result;
  for (const std::string& line : lines) {
    result.push_back(line);
    if (!line.starts_with("reduce_scatter")) continue;
    const std::string broadcast = "broadcast" + line.substr(line.find(' '));
    result.insert(result.end(), 2, broadcast);
  }
  return result;
}

TEST(Order, HsdpHandsSumsFromReplicaToReplica) {
  EXPECT_EQ(lines_of({"hsdp", 2, 0}, 4), in_turns(joined(kForward, kBackward)));
  EXPECT_EQ(lines_of({"hybrid_zero2", 2, 0}, 4), in_turns(joined(kUpdates, kScatters)));
}

TEST(Order, HfsdpGathersUpdatedPartsAcrossReplicas) {
  const Lines update = {"all_gather root update", "all_gather root forward",
                        "all_gather h.0 update",  "all_gather h.1 update",
                        "all_gather h.2 update",  "all_gather h.0 forward",
                        "all_gather h.1 forward", "all_gather h.2 forward"};
  EXPECT_EQ(lines_of({"hfsdp", 2, 0}, 4), in_turns(joined(update, kBackward)));
}

// Sizes of the toy model's flats under a strategy, in elements. A parameter of 300 takes 384.
struct Sizes {
  Sizes(const Placement& placement, int ranks, int shard_ranks) {
    const auto parts = [&](Place place) {
      return place == Place::kWhole ? 1 : place == Place::kShard ? shard_ranks : ranks;
    };
    const auto padded = [&](std::int64_t numel) {
      const int cut = parts(placement.optimizer);
      return cut * (((numel + cut - 1) / cut + 127) / 128 * 128);
    };
    block = padded(768);
    root = padded(384);
    model = 3 * block + root;
    parameters = model / parts(placement.parameters);
    gradients = model / parts(placement.gradients);
    owned = model / parts(placement.optimizer);
  }
  std::int64_t block, root, model;            // whole
  std::int64_t parameters, gradients, owned;  // what a rank holds of the model
};

// With what the defaults mean: resharded to one part is not resharded.
FsdpOptions options_of(const Strategy& strategy, int ranks) {
  FsdpOptions options;
  strategy.apply(options);
  Placement& p = options.placement;
  p.shard_ranks = p.shard_ranks_of(ranks);
  if (p.reshard_ranks == 1 && p.shard_ranks > 1)
    p = {p.parameters, p.gradients, p.optimizer, false, 0, p.shard_ranks};
  return options;
}

// What is sent is counted as the whole of what a collective brings together.
TEST(Bytes, OfAStepEqualAClosedFormula) {
  using Op = comm::Collective::Op;
  const std::array<int, 3> worlds = {4, 2, 6};
  for (const int ranks : std::span(worlds).first(testing::at_most_if_slow(1, 3))) {
    for (const Strategy& strategy : strategies(ranks)) {
      for (const Precision& precision :
           {Precision{}, Precision{DType::kBF16, DType::kBF16, DType::kF32}}) {
        const FsdpOptions options = options_of(strategy, ranks);
        const Placement& p = options.placement;
        const int shards = p.shard_ranks, replicas = ranks / shards;
        const Sizes size(p, ranks, shards);
        const std::int64_t param = size_of(precision.param), grad = size_of(precision.reduce);
        std::map<Op, std::int64_t> expected;
        const bool is_cut = p.parameters != Place::kWhole;
        if (is_cut && shards > 1) {
          expected[Op::kAllGather] +=
              param * (size.root + (p.reshard_after_forward ? 5 : 3) * size.block);
        }
        if (p.optimizer != p.parameters && size.owned != size.parameters) {
          expected[Op::kAllGather] += param * size.parameters;
          // Over a grid shards become whole first.
          if (p.parameters == Place::kWhole && p.optimizer == Place::kWorld && shards > 1 &&
              replicas > 1)
            expected[Op::kAllGather] += param * size.model / shards;
        }
        if (p.gradients == Place::kWhole || shards == 1) {
          expected[Op::kAllReduce] += grad * size.model;
        } else {
          expected[Op::kReduceScatter] += grad * size.model;
          if (replicas > 1) expected[Op::kBroadcast] += replicas * 4 * size.gradients;
        }
        std::map<Op, std::int64_t> sent;
        for (const auto& record : step_of(strategy, ranks, precision)) {
          if (record.text == "all_gather norm") continue;
          const bool gathers = record.op == Op::kAllGather;
          sent[record.op] += gathers ? record.out_nbytes : record.in_nbytes;
        }
        EXPECT_EQ(sent, expected) << strategy.str() << " ranks " << ranks;
      }
    }
  }
}

// Memory
// -----------------------------------------------------------------------------------------

void expect_memory(const Strategy& strategy, int ranks, FsdpOptions options) {
  const Placement p = options.placement;
  const Precision& precision = options.precision;
  const Sizes size(p, ranks, p.shard_ranks);
  const std::int64_t param = size_of(precision.param), accumulate = size_of(precision.accumulate);
  const auto slots = [](int ahead) { return std::min(ahead + 1, 3); };
  std::map<Category, std::int64_t> expected;
  // An f32 master is the rank's own part of what is sent; of bf16 there are both.
  expected[Category::kParameterShard] = param * size.parameters + (param == 4 ? 0 : 4 * size.owned);
  expected[Category::kOptimizer] = 2 * 4 * size.owned;
  if (p.parameters != Place::kWhole) {
    expected[Category::kGatheredParameter] =
        param *
        (size.root + (p.reshard_after_forward ? slots(options.prefetch) : 3) * size.block +
         (p.reshard_ranks > 0 && p.reshard_ranks < p.shard_ranks ? 3 * size.block / p.reshard_ranks
                                                                 : 0));
  } else {
    expected[Category::kGatheredParameter] = 0;
  }
  expected[Category::kGradient] =
      4 * size.gradients +
      accumulate * (size.root + slots(options.reductions_in_flight) * size.block);
  // The largest gradient on its way to another dtype.
  const bool stages = precision.reduce != precision.accumulate;
  const std::int64_t staging = stages ? size_of(precision.reduce) * size.block : 0;
  strategy.apply(options);
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    ToyModel model(3, 300);
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
    AdamW optimizer(fsdp, {});
    EXPECT_EQ(memory.stats().current_nbytes[std::size_t(Category::kCommunication)], staging);
    for (int step = 0; step < 2; ++step) {
      fsdp.begin_step();
      tape.backward(model.loss(tape, Tensor::zeros(memory, {300}, DType::kF32)));
      fsdp.finish_step();
      optimizer.step(1e-3);
    }
    fsdp.synchronize();
    for (const auto& [category, nbytes] : expected) {
      EXPECT_EQ(memory.stats().peak_nbytes[std::size_t(category)], nbytes)
          << name_of(category) << " " << strategy.str() << " ranks " << ranks << " prefetch "
          << options.prefetch << " param " << name_of(precision.param);
    }
  });
}

TEST(MemoryOf, EveryStrategyEqualsAClosedFormula) {
  const std::array<int, 5> aheads = {1, 0, 2, 3, 7};  // more than there are units, too
  for (const int ranks : {1, 2, 3, 4}) {
    for (const Strategy& strategy : strategies(ranks)) {
      for (const int ahead : std::span(aheads).first(testing::at_most_if_slow(1, 5))) {
        for (const Precision& precision :
             {Precision{}, Precision{.param = DType::kBF16, .reduce = DType::kBF16},
              Precision{.param = DType::kBF16, .accumulate = DType::kBF16}}) {
          FsdpOptions options = options_of(strategy, ranks);
          options.prefetch = ahead;
          options.reductions_in_flight = 7 - ahead;
          options.precision = precision;
          expect_memory(strategy, ranks, options);
        }
      }
    }
  }
}

// Errors
// -----------------------------------------------------------------------------------------

std::string error_with(const FsdpOptions& options, int ranks) {
  return error_of<engine::InvalidArgument>([&] {
    comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
      const Memory memory;
      ToyModel model(1, 10);
      const Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root,
                      options);
    });
  });
}

TEST(Errors, NameTheValues) {
  const auto preset = [](const char* name) { return Placement::preset(name); };
  Placement placement = preset("hsdp");
  placement.shard_ranks = 4;
  EXPECT_TRUE(has(error_with({.placement = placement}, 6), {"6", "4"}));
  placement.shard_ranks = -2;
  EXPECT_TRUE(has(error_with({.placement = placement}, 4), {"shard_ranks", "-2"}));
  placement = preset("ddp");
  placement.shard_ranks = 2;
  EXPECT_TRUE(has(error_with({.placement = placement}, 4), {"shard_ranks", "2", "whole"}));
  placement = preset("zero3");
  placement.reshard_ranks = 3;
  EXPECT_TRUE(has(error_with({.placement = placement}, 4), {"4", "3", "reshard_after_forward"}));
  placement = preset("zero2");
  placement.reshard_after_forward = true;
  EXPECT_TRUE(has(error_with({.placement = placement}, 2), {"parameters=whole"}));
  placement = preset("zero2");
  placement.optimizer = Place::kWhole;
  EXPECT_TRUE(has(error_with({.placement = placement}, 2), {"gradients=shard optimizer=whole"}));
  placement = preset("hfsdp");
  placement.gradients = Place::kWorld;
  EXPECT_TRUE(has(error_with({.placement = placement}, 2), {"gradients=world"}));
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([] { Placement::preset("zero4"); }),
                  {"zero4", "zero3", "hfsdp"}));
}

TEST(ShardRanks, OfHybridsAreTheLargestDivisorUpToHalf) {
  const auto of = [](int ranks) { return Placement::preset("hsdp").shard_ranks_of(ranks); };
  EXPECT_EQ((std::vector<int>{of(1), of(2), of(3), of(4), of(6), of(8), of(9), of(15)}),
            (std::vector<int>{1, 1, 1, 2, 3, 4, 3, 5}));
  EXPECT_EQ(Placement::preset("zero3").shard_ranks_of(6), 6);
  EXPECT_EQ(Placement::preset("ddp").shard_ranks_of(6), 1);
}

TEST(Presets, DifferFromEachOther) {
  std::vector<std::string> names = Placement::preset_names();
  for (const char* alias : {"full_shard", "fsdp"}) {
    EXPECT_EQ(Placement::preset(alias), Placement::preset("zero3"));
    std::erase(names, alias);
  }
  EXPECT_EQ(names.size(), 8u);
  for (const std::string& a : names) {
    for (const std::string& b : names) {
      EXPECT_EQ(Placement::preset(a) == Placement::preset(b), a == b) << a << " " << b;
    }
  }
}

TEST(Presets, OfHybridsMakeReplicas) {
  const std::map<std::string, int> expected = {{"hsdp", 2},  {"hybrid_zero2", 2}, {"hfsdp", 2},
                                               {"zero3", 1}, {"zero1", 1},        {"ddp", 4}};
  for (const auto& [name, num_replicas] : expected) {
    comm::run_ranks(4, {}, [&, &name = name, &num_replicas = num_replicas](ProcessGroup& world) {
      const Memory memory;
      ToyModel model(1, 10);
      const Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root,
                      {.placement = Placement::preset(name)});
      EXPECT_EQ(fsdp.mesh().num_replicas(), num_replicas) << name;
    });
  }
}

}  // namespace
}  // namespace tessera::shard
