// A step of Fsdp as one CUDA graph: the bits of steps without, whatever comes between, and what
// cannot be captured.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/elementwise.h"
#include "shard/cut_values.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::Tensor;
using testing::error_of;
using testing::ToyModel;
using testing::train;
using testing::Training;

void expect_equal_bits(Training run) {
  run.ranks = 1;
  run.num_gpus = 1;
  run.steps = 6;
  run.lr_decay = 0.5;
  const std::vector<float> expected = train(run);
  for (const int graph_from : {1, 2}) {
    run.graph_from = graph_from;
    EXPECT_EQ(train(run), expected)
        << to_string(run.options.placement) << " prefetch " << run.options.prefetch << " accum "
        << run.accum << ", a graph from step " << graph_from;
  }
}

TEST(CudaGraph, EveryStrategyHasTheBitsOfStepsWithout) {
  for (const char* strategy : {"zero3", "shard_grad_op", "zero2", "zero1", "ddp"}) {
    for (const int prefetch : {0, 1, 2}) {
      expect_equal_bits({.poison = true,
                         .delay_seed = 3,
                         .options = {.placement = Placement::preset(strategy),
                                     .prefetch = prefetch,
                                     .reductions_in_flight = prefetch}});
    }
  }
}

TEST(CudaGraph, EveryOptionHasTheBitsOfStepsWithout) {
  const Precision half{DType::kBF16, DType::kBF16, DType::kF32};
  expect_equal_bits({.accum = 3, .recompute = true, .max_norm = 0.5});
  expect_equal_bits({.accum = 2, .adamw = true, .max_norm = 0.5, .delay_seed = 5});
  expect_equal_bits({.adamw = true, .poison = true, .options = {.precision = half}});
  expect_equal_bits({.accum = 2, .no_sync = true});
  expect_equal_bits({.accum = 2, .rounds = 2, .options = {.prefetch = 2}});
  expect_equal_bits({.blocks = 4, .numel = 77, .options = {.prefetch = 1}});  // odd rings
  expect_equal_bits({.blocks = 5, .numel = 77, .options = {.unit_min_numel = 300}});
  expect_equal_bits({.blocks = 5,
                     .numel = 77,
                     .options = {.placement = Placement::preset("zero1"), .bucket_nbytes = 1300}});
}

// More than one launch stores, of which one changes from step to step.
TEST(CudaGraph, ManyGroupsHaveTheBitsOfStepsWithout) {
  expect_equal_bits({.blocks = 100, .numel = 40, .adamw = true, .many_groups = true});
}

// Evaluations take slots and memory, and end with units gathered ahead.
TEST(CudaGraph, WhatComesBetweenChangesNothing) {
  for (const char* strategy : {"zero3", "ddp"}) {
    Training run{.ranks = 1,
                 .steps = 5,
                 .blocks = 4,
                 .adamw = true,
                 .max_norm = 1,
                 .lr_decay = 0.5,
                 .poison = true,
                 .delay_seed = 7,
                 .options = {.placement = Placement::preset(strategy)},
                 .num_gpus = 1};
    const std::vector<float> expected = train(run);
    run.graph_from = 1;
    std::vector<float> losses;
    run.between_steps = [&](Fsdp& fsdp, engine::Tape& tape, ToyModel& model) {
      const Tensor x = Tensor::zeros(tape.memory(), {run.numel}, DType::kF32);
      losses.push_back(tape.no_grad([&] { return model.loss(tape, x, false).item(); }));
      EXPECT_EQ(std::ssize(fsdp.full_parameter(*fsdp.parameters().front())), run.numel);
    };
    EXPECT_EQ(train(run), expected) << strategy;
    ASSERT_EQ(losses.size(), 4u);
    EXPECT_NE(losses.front(), losses.back());  // of the parameters of that time
  }
}

// On a GPU.
struct Rank : testing::ToyRank {
  explicit Rank(comm::ProcessGroup& world, const FsdpOptions& options = {})
      : ToyRank(world, options,
                {.numel = 300, .poison = false, .compute = engine::Stream::cuda("compute", 0)}) {}

  GradNorm step(double max_norm = 1) {
    fsdp.begin_step();
    tape.backward(model.loss(tape, x, false));
    GradNorm norm = fsdp.finish_step();
    sgd.step(1e-3, norm, max_norm);
    return norm;
  }
  std::vector<float> parameter() { return fsdp.full_parameter(*fsdp.parameters().front()); }

  Sgd sgd{fsdp, {}};
  Tensor x = Tensor::zeros(memory, {300}, DType::kF32);
};

// One that gathers what it keeps of each unit.
class Gathering : public Optimizer {
 public:
  Gathering(Fsdp& fsdp, bool is_elementwise)
      : Optimizer(fsdp, {.name = "gathering",
                         .states = {"kept"},
                         .groups = {{.name = "all"}},
                         .is_elementwise = is_elementwise}) {}
  ~Gathering() override { end_updates(); }

 private:
  void update_unit(UnitUpdate& update) override {
    static_cast<void>(gather(update, update.states[0]));
  }
};

TEST(CudaOptimizer, OneThatNeedsWholeMatricesIsNotCaptured) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    Rank rank(world);
    Gathering optimizer(rank.fsdp, false);
    const auto step = [&] {
      rank.fsdp.begin_step();
      rank.tape.backward(rank.model.loss(rank.tape, rank.x, false));
      optimizer.step(1e-3, rank.fsdp.finish_step(), 1);
    };
    step();
    EXPECT_NE(error_of<engine::InvalidArgument>([&] {
                static_cast<void>(rank.fsdp.capture_step(step));
              }).find("no capture of a step by 'gathering'"),
              std::string::npos);
    step();
  });
}

// An early update has a stream of its own, which may not use the memory of compute.
TEST(CudaOptimizer, NothingIsGatheredByAnEarlyUpdate) {
  const std::string error = error_of<engine::InvalidArgument>([] {
    comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
      Rank rank(world);
      Gathering optimizer(rank.fsdp, true);
      optimizer.step_in_backward(1e-3);
      rank.fsdp.begin_step();
      rank.tape.backward(rank.model.loss(rank.tape, rank.x, false));
    });
  });
  EXPECT_NE(error.find("gather on the compute stream"), std::string::npos) << error;
}

// What clips is worked out on each GPU, where nobody could see that it differs.
TEST(CudaOptimizer, RanksThatClipByDifferentNormsAreToldSo) {
  const std::string error = error_of<engine::CommError>([] {
    comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
      Rank rank(world);
      rank.step(1 + world.rank());
      rank.compute.synchronize();
    });
  });
  EXPECT_NE(error.find("max_norm 1"), std::string::npos) << error;
  EXPECT_NE(error.find("max_norm 2"), std::string::npos) << error;
}

TEST(CudaGraph, GradientsThatAreNotFiniteSkipTheUpdateOfThatStep) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    Rank rank(world, {.non_finite = NonFinite::kSkip});
    rank.step();
    std::optional<GradNorm> captured;
    const auto launch = rank.fsdp.capture_step([&] { captured = rank.step(); });
    EXPECT_NE(error_of<engine::InvalidArgument>([&] { captured->value(); }).find("read_norm"),
              std::string::npos);
    std::vector<GradNorm> norms;
    const auto run = [&](float first) {
      rank.x.slice(0, {1}).copy_from_host(&first, 1);
      rank.sgd.repeat_step(1e-3);
      launch();
      norms.push_back(rank.fsdp.read_norm(*captured));
      return rank.parameter();
    };
    const std::vector<float> before = run(1);
    EXPECT_EQ(run(NAN), before);
    EXPECT_NE(run(2), before);
    EXPECT_EQ(norms[0].not_finite(), "");
    EXPECT_NE(norms[1].not_finite(), "");
    EXPECT_GT(norms[2].value(), 0);
    EXPECT_EQ(rank.sgd.num_steps(), 3);  // with the first, without the one that was skipped
  });
}

TEST(CudaGraph, WhoReadsValuesIsWaitedFor) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    Rank rank(world);
    engine::launch_set(rank.compute, rank.x, 1, "x");
    rank.step();
    const auto launch = rank.fsdp.capture_step([&] { rank.step(); });
    const engine::Stream reader = rank.compute.sibling("reader", {.delay_seed = 9});
    const Tensor master =
        rank.fsdp.units().front()->flats().front().master.device().slice(0, {300});
    const Tensor read = Tensor::zeros(rank.memory, master.shape(), DType::kF32);
    const std::vector<float> expected = engine::to_vector<float>(master);
    reader.wait(rank.compute.record("now"));
    for (int i = 0; i < 20; ++i) engine::launch_fill(reader, read, 0, "late");
    engine::copy(read, master, reader);
    CutValues(rank.fsdp).keep_until(reader.record("read"));
    rank.sgd.repeat_step(1e-3);
    launch();
    reader.synchronize();
    EXPECT_EQ(engine::to_vector<float>(read), expected);
    EXPECT_NE(engine::to_vector<float>(master), expected);
  });
}

TEST(CudaGraph, ACaptureThatFailsLeavesStepsAsTheyWere) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    Rank expected(world), rank(world);
    for (int i = 0; i < 3; ++i) expected.step();
    rank.step();
    EXPECT_NE(error_of<engine::InvalidArgument>([&] {
                static_cast<void>(rank.fsdp.capture_step([&] { rank.step().value(); }));
              }).find("read_norm"),
              std::string::npos);
    rank.step();
    EXPECT_NE(error_of<engine::InvalidArgument>([&] {
                static_cast<void>(rank.fsdp.capture_step([&] {
                  rank.fsdp.begin_step();
                  const Tensor loss = rank.model.loss(rank.tape, rank.x, false);
                  rank.tape.backward(loss);
                  static_cast<void>(loss.item());
                }));
              }).find("[graph]"),
              std::string::npos);
    rank.step();
    EXPECT_EQ(rank.parameter(), expected.parameter());
  });
}

TEST(CudaGraph, RefusesWhatTheHostTakesPartIn) {
  const auto refuses = [](const FsdpOptions& options, int ranks, const std::string& what) {
    comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
      Rank rank(world, options);
      EXPECT_NE(error_of<engine::InvalidArgument>([&] {
                  static_cast<void>(rank.fsdp.capture_step([&] { rank.step(); }));
                }).find(what),
                std::string::npos)
          << what;
    });
  };
  refuses({}, 2, "got 2");
  refuses({.offload = {.optimizer = 1}}, 1, "offloaded");
  refuses({.check_gradients = true}, 1, "check_gradients");
  refuses({.unused_parameters = UnusedParameters::kSkip}, 1, "kSkip");
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    Rank rank(world);
    EXPECT_NE(error_of<engine::InvalidArgument>([&] {
                static_cast<void>(rank.fsdp.capture_step([&] { rank.fsdp.begin_step(); }));
              }).find("a whole step"),
              std::string::npos);
    rank.sgd.step_in_backward(1e-3);
    EXPECT_NE(error_of<engine::InvalidArgument>([&] {
                static_cast<void>(rank.fsdp.capture_step([&] { rank.step(); }));
              }).find("step_in_backward"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::shard
