// Ranks that do not all do the same: some run out of batches, or leave out parts of the model. What
// comes out is what one process has that accumulates the batches there are.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::LoggedGroup;
using testing::ToyModel;

constexpr std::int64_t kNumel = 130;
constexpr int kMicroSteps = 2;

// Ranks that wait for each other for ever fail before the test does.
const comm::ThreadsOptions kSoon{.deadline = std::chrono::seconds(20)};

FsdpOptions with(const std::string& strategy, int ranks) {
  FsdpOptions options{.placement = Placement::preset(strategy)};
  if (!options.placement.is_whole()) options.shard_ranks = default_shard_ranks(strategy, ranks);
  return options;
}

// One rank's model, wrapped, and its optimizer.
struct Trainer {
  Trainer(ProcessGroup& world, const FsdpOptions& options)
      : compute(Stream::inline_cpu("compute")),
        memory(compute, {.poison = true}),
        tape(memory, compute),
        model(4, kNumel),
        fsdp(world, memory, compute, model.blocks(), &model.root, options),
        optimizer(fsdp, {.momentum = 0.9}) {}

  // A forward and a backward that know the batch by its number.
  void run(int batch, bool recompute = false, int rounds = 1) {
    std::vector<float> values(kNumel);
    const engine::RandomStream random{7, static_cast<std::uint64_t>(batch)};
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
    const auto x = Tensor::from<float>(memory, {kNumel}, values, "x");
    tape.backward(model.loss(tape, x, recompute, rounds));
  }
  void update() {
    const GradNorm norm = fsdp.finish_step();
    result.push_back(norm.value());
    optimizer.step(1e-2, norm, /*max_norm=*/5);
  }
  std::vector<float> take() {
    for (const Parameter* p : fsdp.parameters()) {
      const std::vector<float> values = fsdp.full_parameter(*p);
      result.insert(result.end(), values.begin(), values.end());
      const std::vector<float> velocity = optimizer.full_state(*p, "velocity");
      result.insert(result.end(), velocity.begin(), velocity.end());
    }
    return std::move(result);
  }

  Stream compute;
  Memory memory;
  Tape tape;
  ToyModel model;
  Fsdp fsdp;
  Sgd optimizer;
  std::vector<float> result;
};

// Unequal numbers of batches
// -------------------------------------------------------------------------------------

// What each rank has: rank 0 the most, two in a row with the same, the last one ends first.
int num_batches(int rank, int ranks) { return ranks == 1 ? 7 : 7 - (rank + 1) / 2 * 2; }

// The batches of step `step` in the order of one process: micro-step by micro-step, rank by rank.
std::vector<int> batches_of(int step, int ranks) {
  std::vector<int> all;
  for (int i = kMicroSteps * step; i < kMicroSteps * (step + 1); ++i) {
    for (int r = 0; r < ranks; ++r) {
      if (i < num_batches(r, ranks)) all.push_back(100 * r + i);
    }
  }
  return all;
}

std::vector<float> one_process(int ranks) {
  std::vector<float> result;
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    Trainer trainer(world, with("ddp", 1));
    for (int step = 0; !batches_of(step, ranks).empty(); ++step) {
      const std::vector<int> batches = batches_of(step, ranks);
      trainer.fsdp.begin_step(static_cast<int>(batches.size()));
      for (const int& batch : batches) {
        if (&batch != batches.data()) trainer.fsdp.next_micro_step();
        trainer.run(batch);
      }
      trainer.update();
    }
    result = trainer.take();
  });
  return result;
}

struct Way {
  int prefetch = 1;
  bool recompute = false;
  std::int64_t unit_min_numel = 0;
  std::int64_t bucket_nbytes = 0;  // where parameters are whole
  UnusedParameters unused = UnusedParameters::kZero;
};

// The same on ranks; `lines`: what each rank called, as text.
std::vector<float> joined(const std::string& strategy, int ranks, const Way& way,
                          std::vector<std::vector<std::string>>* lines = nullptr) {
  std::vector<float> result;
  std::vector<std::vector<std::string>> all(static_cast<std::size_t>(ranks));
  comm::run_ranks(ranks, kSoon, [&](ProcessGroup& group) {
    CollectiveLog log;
    LoggedGroup world(group, log);
    FsdpOptions options = with(strategy, ranks);
    options.prefetch = way.prefetch;
    options.unit_min_numel = way.unit_min_numel;
    options.unused_parameters = way.unused;
    if (options.placement.parameters == Place::kWhole && way.bucket_nbytes > 0) {
      options.unit_min_numel = 0;
      options.bucket_nbytes = way.bucket_nbytes;
      options.first_bucket_nbytes = 1;
    }
    Trainer trainer(world, options);
    const int rank = world.rank(), count = num_batches(rank, ranks);
    int next = 0;
    while (const int n = trainer.fsdp.join(std::min(kMicroSteps, count - next))) {
      for (int micro = 0; micro < n; ++micro) {
        micro == 0 ? trainer.fsdp.begin_step(n) : trainer.fsdp.next_micro_step();
        if (next < count) trainer.run(100 * rank + next++, way.recompute);
      }
      trainer.update();
    }
    EXPECT_EQ(next, count);
    all[static_cast<std::size_t>(rank)] = log.take();
    const std::vector<float> mine = trainer.take();
    if (rank == 0) result = mine;
  });
  if (lines != nullptr) *lines = all;
  return result;
}

TEST(Join, EqualsOneProcessThatHasTheBatchesThereAre) {
  for (const int ranks : {1, 2, 4}) {
    const std::vector<float> expected = one_process(ranks);
    int turn = 0;
    for (const std::string& strategy : Placement::preset_names()) {
      const Way way{.prefetch = turn % 3,
                    .recompute = turn % 2 == 0,
                    .unit_min_numel = turn % 4 == 3 ? 500 : 0,
                    .bucket_nbytes = ranks == 4 ? 2000 : 0,
                    .unused = turn % 5 == 2 ? UnusedParameters::kSkip : UnusedParameters::kZero};
      EXPECT_EQ(joined(strategy, ranks, way), expected) << strategy << " on " << ranks;
      ++turn;
    }
  }
}

// Not only do the numbers agree: a rank that only takes part calls what its peers call.
TEST(Join, RanksWithoutABatchCallWhatTheOthersCall) {
  for (const char* strategy : {"zero3", "shard_grad_op", "ddp", "zero1"}) {
    std::vector<std::vector<std::string>> lines;
    joined(strategy, 2, {}, &lines);
    EXPECT_GT(lines[0].size(), 20u);
    EXPECT_EQ(lines[0], lines[1]) << strategy;
  }
}

TEST(Join, TakesPartInStepsThatReduceOnceAndInBackwardsThatAreSeveral) {
  // Rank 0 has two batches a step, rank 1 has them in the first step alone.
  const auto run = [](int ranks, bool no_sync) {
    std::vector<float> result;
    comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
      Trainer trainer(world, with("zero3", ranks));
      for (int step = 0; step < 3; ++step) {
        const bool has_batch = world.rank() == 0 || step == 0;
        EXPECT_EQ(trainer.fsdp.join(has_batch ? 2 : 0), 2);
        for (int micro = 0; micro < 2; ++micro) {
          const MicroStep options{.no_sync = no_sync && micro == 0, .num_backwards = 2};
          micro == 0 ? trainer.fsdp.begin_step(2, options) : trainer.fsdp.next_micro_step(options);
          for (int i = 0; i < 2 && has_batch; ++i) trainer.run(10 * step + 2 * micro + i);
        }
        if (step > 0) {
          EXPECT_EQ(trainer.fsdp.mean_scale(), 0.5);
        }
        trainer.update();
      }
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  for (const bool no_sync : {false, true}) {
    const std::vector<float> both = run(2, no_sync);
    std::vector<float> alone;
    comm::run_ranks(1, {}, [&](ProcessGroup& world) {
      Trainer trainer(world, with("ddp", 1));
      for (int step = 0; step < 3; ++step) {
        // In the first step both ranks have the same two batches: their sum is twice the one.
        trainer.fsdp.begin_step(2, {.no_sync = no_sync, .num_backwards = 2});
        for (int i = 0; i < 2; ++i) trainer.run(10 * step + i);
        trainer.fsdp.next_micro_step({.num_backwards = 2});
        for (int i = 2; i < 4; ++i) trainer.run(10 * step + i);
        trainer.update();
      }
      alone = trainer.take();
    });
    ASSERT_EQ(both.size(), alone.size());
    for (std::size_t i = 0; i < both.size(); ++i) ASSERT_NEAR(both[i], alone[i], 1e-4) << i;
  }
}

TEST(Join, SaysWhatIsWrong) {
  const auto errors = [](auto fn) {
    std::vector<std::string> all(2);
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      Trainer trainer(world, with("zero3", 2));
      all[static_cast<std::size_t>(world.rank())] =
          error_of<engine::InvalidArgument>([&] { fn(trainer, world.rank()); });
    });
    return all;
  };
  for (const std::string& error :
       errors([](Trainer&t, int rank) { t.fsdp.join(rank == 0 ? 2 : 0); })) {
    EXPECT_TRUE(has(error, {"expected a batch on every rank until each", "none on rank 1"}));
  }
  for (const std::string& error : errors([](Trainer&t, int) { t.fsdp.join(-1); })) {
    EXPECT_TRUE(has(error, {"expected a number of batches, got -1"}));
  }
  for (const std::string& error : errors([](Trainer&t, int) {
         t.fsdp.begin_step();
         t.fsdp.join(1);
       })) {
    EXPECT_TRUE(has(error, {"expected join() between steps"}));
  }
  for (const std::string& error : errors([](Trainer&t, int) {
         EXPECT_EQ(t.fsdp.join(2), 2);
         t.fsdp.begin_step(1);
       })) {
    EXPECT_TRUE(has(error, {"expected the 2 micro-steps that join() returned, got 1", "(rank "}));
  }
  for (const std::string& error : errors([](Trainer&t, int) {
         EXPECT_EQ(t.fsdp.join(0), 0);
         t.fsdp.begin_step(1);
       })) {
    EXPECT_TRUE(has(error, {"expected no step after a join() that returned 0"}));
  }
  for (const std::string& error : errors([](Trainer&t, int) {
         EXPECT_EQ(t.fsdp.join(2), 2);
         t.fsdp.begin_step(2);
         t.run(1);
         t.fsdp.next_micro_step();
         t.fsdp.finish_step();
       })) {
    EXPECT_TRUE(has(error, {"expected a backward in micro-step 2 of 2", "got none (rank "}));
  }
}

TEST(Join, RefusesAForwardWhereThereIsNoBatch) {
  std::string error;
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    Trainer trainer(world, with("zero3", 2));
    trainer.fsdp.begin_step();
    trainer.run(1);
    trainer.update();
    trainer.fsdp.join(world.rank() == 0 ? 1 : 0);
    trainer.fsdp.begin_step();
    if (world.rank() == 1) {
      error = error_of<engine::InvalidArgument>([&] { trainer.run(2); });
      trainer.tape.clear();
    } else {
      trainer.run(2);
    }
    trainer.update();
  });
  EXPECT_TRUE(has(error, {"expected neither forward nor backward", "'root'"}));
}

// What join() said holds for one step, which may be given up.
TEST(Join, IsForgottenBehindItsStep) {
  for (const bool gives_up : {true, false}) {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      Trainer trainer(world, with("zero3", 2));
      trainer.fsdp.begin_step();
      trainer.run(1);
      trainer.update();
      EXPECT_EQ(trainer.fsdp.join(world.rank() == 0 ? 1 : 0), 1);
      trainer.fsdp.begin_step();
      if (world.rank() == 0) trainer.run(2);
      gives_up ? trainer.fsdp.cancel_step() : trainer.update();
      trainer.fsdp.begin_step(2);
      EXPECT_EQ(trainer.fsdp.mean_scale(), 0.25);
      trainer.run(3);
      trainer.fsdp.next_micro_step();
      trainer.run(4);
      trainer.update();
    });
  }
}

TEST(Join, OfNobodyIsTheEndBeforeTheFirstStepAsWell) {
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    Trainer trainer(world, with("zero3", 2));
    EXPECT_EQ(trainer.fsdp.join(0), 0);
  });
}

TEST(Join, RepeatsTheLastMicroStepThatHadABackward) {
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    Trainer trainer(world, with("zero3", 2));
    trainer.fsdp.begin_step();
    trainer.run(1);
    trainer.update();
    trainer.fsdp.begin_step();  // and no rank has a backward
    EXPECT_EQ(trainer.fsdp.finish_step().value(), 0);
    EXPECT_EQ(trainer.fsdp.join(world.rank() == 0 ? 1 : 0), 1);
    trainer.fsdp.begin_step();
    if (world.rank() == 0) trainer.run(2);
    EXPECT_GT(trainer.fsdp.finish_step().value(), 0);
  });
}

// Ranks that differ in more than the number of batches: an error on every rank, and no hang.
TEST(Join, NoticesRanksThatDifferInMoreThanBatches) {
  std::vector<std::string> errors(2);
  try {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      Trainer trainer(world, with("zero3", 2));
      const auto step = [&](int rounds) {
        trainer.fsdp.join(world.rank() == 0 || rounds == 1 ? 1 : 0);
        trainer.fsdp.begin_step();
        if (world.rank() == 0 || rounds == 1) trainer.run(1, false, rounds);
        trainer.update();
      };
      try {
        step(1);
        step(2);
      } catch (const engine::CommError& error) {
        errors[static_cast<std::size_t>(world.rank())] = error.what();
        throw;
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const engine::CommError&) {
  }
  for (const std::string& error : errors) EXPECT_TRUE(has(error, {"expected", "h."})) << error;
}

// Parameters that are not used
// -----------------------------------------------------------------------------------

// Which layers a batch goes through.
std::vector<int> layers_of(int batch) {
  return batch % 3 == 0   ? std::vector<int>{0, 1, 2, 3}
         : batch % 3 == 1 ? std::vector<int>{0, 3}
                          : std::vector<int>{2};
}

void run_through(Trainer& trainer, int batch, const std::vector<int>& layers) {
  const auto x = Tensor::from<float>(trainer.memory, {kNumel},
                                     std::vector<float>(kNumel, 1.0f + float(batch)), "x");
  trainer.tape.backward(trainer.tape.region(trainer.model.root, [&] {
    Tensor h = testing::affine(trainer.tape, x, trainer.model.scale, nullptr);
    for (const int i : layers) {
      auto& l = *trainer.model.layers[static_cast<std::size_t>(i)];
      h = trainer.tape.region(l.block,
                              [&] { return testing::affine(trainer.tape, h, l.weight, &l.bias); });
    }
    return testing::sum(trainer.tape,
                        testing::affine(trainer.tape, h, trainer.model.scale, nullptr));
  }));
}

// Each micro-step of each rank leaves out other units.
TEST(Unused, RanksMayLeaveOutDifferentUnits) {
  const auto run = [](const std::string& strategy, int ranks, int accum) {
    std::vector<float> result;
    comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
      FsdpOptions options = with(strategy, ranks);
      options.unused_parameters = UnusedParameters::kSkip;
      Trainer trainer(world, options);
      for (int step = 0; step < 3; ++step) {
        trainer.fsdp.begin_step(accum);
        for (int micro = 0; micro < accum; ++micro) {
          if (micro > 0) trainer.fsdp.next_micro_step();
          const int batch = (step * accum + micro) * ranks + world.rank();
          run_through(trainer, batch, step == 2 ? std::vector<int>{1} : layers_of(batch));
        }
        trainer.update();
      }
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const std::vector<float> expected = run("ddp", 1, 8);
  for (const int ranks : {2, 4}) {
    for (const char* strategy : {"ddp", "zero1", "zero2", "hybrid_zero2"}) {
      EXPECT_EQ(run(strategy, ranks, 8 / ranks), expected) << strategy << " on " << ranks;
    }
  }
}

// Two steps: all layers, then only layer 1. What becomes of the others in the second?
TEST(Unused, ParametersAreLeftAloneOrHaveAGradientOfZero) {
  for (const std::string& strategy : Placement::preset_names()) {
    for (const auto unused : {UnusedParameters::kSkip, UnusedParameters::kZero}) {
      comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
        FsdpOptions options = with(strategy, 2);
        options.unused_parameters = unused;
        Trainer trainer(world, options);
        trainer.fsdp.begin_step();
        run_through(trainer, 0, {0, 1, 2, 3});
        trainer.update();
        const bool skips = unused == UnusedParameters::kSkip;
        EXPECT_TRUE(has(
            error_of<engine::InvalidArgument>([&] { trainer.fsdp.is_unused(trainer.model.scale); }),
            {"between finish_step() and the optimizer", "scale"}));
        for (int step = 0; step < 2; ++step) {
          std::vector<std::vector<float>> before, velocity;
          for (const Parameter* p : trainer.fsdp.parameters()) {
            before.push_back(trainer.fsdp.full_parameter(*p));
            velocity.push_back(trainer.optimizer.full_state(*p, "velocity"));
          }
          trainer.fsdp.begin_step();
          run_through(trainer, 1, {1});
          const GradNorm norm = trainer.fsdp.finish_step();
          for (const Parameter* p : trainer.fsdp.parameters()) {
            const bool is_used = p->name.starts_with("h.1.") || p->name == "scale";
            if (skips) {
              EXPECT_EQ(trainer.fsdp.is_unused(*p), !is_used) << p->name;
            }
            if (is_used) continue;
            EXPECT_EQ(trainer.fsdp.full_gradient(*p), std::vector<float>(kNumel)) << p->name;
          }
          trainer.optimizer.step(1e-2, norm, 0);
          std::size_t i = 0;
          for (const Parameter* p : trainer.fsdp.parameters()) {
            const bool stays = skips && !p->name.starts_with("h.1.") && p->name != "scale";
            EXPECT_EQ(trainer.fsdp.full_parameter(*p) == before[i], stays) << p->name;
            EXPECT_EQ(trainer.optimizer.full_state(*p, "velocity") == velocity[i], stays)
                << p->name;
            ++i;
          }
        }
        // Used again, it learns again.
        const std::vector<float> before =
            trainer.fsdp.full_parameter(trainer.model.layers[0]->bias);
        trainer.fsdp.begin_step();
        run_through(trainer, 0, {0, 1, 2, 3});
        trainer.update();
        EXPECT_NE(trainer.fsdp.full_parameter(trainer.model.layers[0]->bias), before);
      });
    }
  }
}

// The order of reductions is one that no rank's own program decides, and still goes on beside
// backward: what a rank leaves out holds nothing up.
TEST(Unused, UnitsAreReducedInTheDeclaredOrderBackwards) {
  std::vector<std::vector<std::string>> lines(2);
  comm::run_ranks(2, kSoon, [&](ProcessGroup& group) {
    CollectiveLog log;
    LoggedGroup world(group, log);
    Trainer trainer(world, {.placement = Placement::preset("ddp"),
                            .unused_parameters = UnusedParameters::kSkip});
    log.take();
    trainer.fsdp.begin_step();
    trainer.tape.no_grad([&] {  // uses all of them, and no backward comes of it
      return trainer.model.loss(trainer.tape, Tensor::zeros(trainer.memory, {kNumel}, DType::kF32));
    });
    run_through(trainer, 1, world.rank() == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{3});
    if (world.rank() == 0) {
      EXPECT_EQ(log.take().size(), 5u) << "all of them before the step ends";
    }
    trainer.fsdp.finish_step();
    lines[static_cast<std::size_t>(world.rank())] = log.take();
  });
  ASSERT_GE(lines[1].size(), 5u);
  const char* const expected[] = {"h.3", "h.2", "h.1", "h.0", "root"};
  for (std::size_t i = 0; i < 5; ++i) EXPECT_TRUE(has(lines[1][i], {"all_reduce", expected[i]}));
}

// A unit that the first backward leaves out may come with the second: it is not final before. The
// reference cuts parameters, so that each unit is reduced on its own.
TEST(Unused, UnitsMayComeWithALaterBackward) {
  const auto run = [](const std::string& strategy, int ranks) {
    std::vector<float> result;
    comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
      FsdpOptions options = with(strategy, ranks);
      options.unused_parameters = UnusedParameters::kSkip;
      Trainer trainer(world, options);
      const int accum = 4 / ranks;
      trainer.fsdp.begin_step(accum, {.num_backwards = 2});
      for (int micro = 0; micro < accum; ++micro) {
        if (micro > 0) trainer.fsdp.next_micro_step({.num_backwards = 2});
        const int batch = micro * ranks + world.rank();
        run_through(trainer, batch, {0});
        run_through(trainer, batch, batch == 1 ? std::vector<int>{0} : std::vector<int>{1, 2});
      }
      trainer.update();
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const std::vector<float> expected = run("zero3", 1);
  for (const int ranks : {1, 2, 4}) {
    for (const char* strategy : {"ddp", "zero1", "zero2"}) {
      EXPECT_EQ(run(strategy, ranks), expected) << strategy << " on " << ranks;
    }
  }
}

// Nor is a unit whose backward comes when the region around it is recomputed.
TEST(Unused, UnitsInRecomputedRegionsAreUsed) {
  const auto run = [](const std::string& strategy) {
    std::vector<float> result;
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      FsdpOptions options = with(strategy, 2);
      options.unused_parameters = UnusedParameters::kSkip;
      Trainer trainer(world, options);
      trainer.fsdp.begin_step();
      trainer.tape.backward(trainer.tape.region(trainer.model.root, [&] {
        const Tensor x =
            Tensor::from<float>(trainer.memory, {kNumel}, std::vector<float>(kNumel, 1.5f), "x");
        const auto layer = [&trainer](std::size_t i, const Tensor& in) {
          auto& l = *trainer.model.layers[i];
          return testing::affine(trainer.tape, in, l.weight, &l.bias);
        };
        const auto region = [&trainer, layer](std::size_t i, const Tensor& in) {
          return trainer.tape.region(trainer.model.layers[i]->block, [=] { return layer(i, in); });
        };
        const Tensor h =
            trainer.tape.region(trainer.model.layers[0]->block,
                                [=] { return region(1, layer(0, x)); }, {.recompute = true});
        return testing::sum(trainer.tape, region(3, h));
      }));
      trainer.update();
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const std::vector<float> expected = run("zero3");
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    EXPECT_EQ(run(strategy), expected) << strategy;
  }
}

// Nor is its gradient complete while a visit is to come that uses none of its parameters.
TEST(Unused, AVisitWithoutUsesIsWaitedFor) {
  for (const char* strategy : {"zero3", "ddp"}) {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& group) {
      CollectiveLog log;
      LoggedGroup world(group, log);
      Trainer trainer(world, with(strategy, 2));
      log.take();
      trainer.fsdp.begin_step();
      trainer.tape.backward(trainer.tape.region(trainer.model.root, [&] {
        auto& l = *trainer.model.layers[0];
        const Tensor x =
            Tensor::from<float>(trainer.memory, {kNumel}, std::vector<float>(kNumel, 1.5f), "x");
        const Tensor h = trainer.tape.region(l.block, [&] {
          return testing::affine(trainer.tape, x, trainer.model.scale, nullptr);
        });
        return testing::sum(trainer.tape, trainer.tape.region(l.block, [&] {
          return testing::affine(trainer.tape, h, l.weight, &l.bias);
        }));
      }));
      trainer.fsdp.finish_step();
      int num_reductions = 0;
      for (const std::string& line : log.take()) {
        num_reductions += has(line, {"reduce", "h.0"}) ? 1 : 0;
      }
      EXPECT_EQ(num_reductions, 1) << strategy;
    });
  }
}

// As when only a head of one's own is trained, outside of what is wrapped.
TEST(Unused, AModelThatIsFrozenAsAWholeHasNoneToSkip) {
  for (const char* strategy : {"ddp", "zero3"}) {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      const Memory memory;
      const Stream compute = Stream::inline_cpu("compute");
      ToyModel model(2, kNumel);
      model.scale.trainable = false;
      for (const auto& layer : model.layers) {
        layer->weight.trainable = layer->bias.trainable = false;
      }
      FsdpOptions options = with(strategy, 2);
      options.unused_parameters = UnusedParameters::kSkip;
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
      Tape tape(memory, compute);
      for (int step = 0; step < 2; ++step) {
        fsdp.begin_step();
        tape.no_grad(
            [&] { return model.loss(tape, Tensor::zeros(memory, {kNumel}, DType::kF32)); });
        EXPECT_EQ(fsdp.finish_step().value(), 0);
        EXPECT_FALSE(fsdp.is_unused(model.scale));
      }
    });
  }
}

TEST(Unused, PlansThatDifferAreRefused) {
  std::string error;
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    FsdpOptions options = with("ddp", 2);
    if (world.rank() == 1) options.unused_parameters = UnusedParameters::kSkip;
    const std::string mine =
        error_of<engine::InvalidArgument>([&] { const Trainer trainer(world, options); });
    if (world.rank() == 0) error = mine;
  });
  EXPECT_TRUE(has(error, {"unused_parameters zero", "unused_parameters skipped"}));
}

}  // namespace
}  // namespace tessera::shard
