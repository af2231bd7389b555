// Steps that are not one forward and one backward: several of them, evaluations in between, several
// micro-steps, skipped blocks, steps that are given up. And what is refused.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/usage_patterns.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::InvalidArgument;
using engine::Stream;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::CollectiveLog;
using tessera::testing::error_of;
using tessera::testing::forward;
using tessera::testing::has;
using tessera::testing::LoggedGroup;
using tessera::testing::sum;
using tessera::testing::ToyRank;

TEST(FsdpSteps, SeveralForwardsBeforeBackwardAddUp) {
  // loss(x) + loss(x) in one backward has twice the gradient of loss(x).
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    ToyRank rank(world);
    const auto norm_of = [&](std::size_t times) {
      rank.fsdp.begin_step();
      std::vector<Tensor> losses;
      while (losses.size() < times) losses.push_back(rank.model.loss(rank.tape, rank.input()));
      rank.tape.backward(losses);
      return rank.fsdp.finish_step().value();
    };
    const float once = norm_of(1);
    EXPECT_GT(once, 0);
    EXPECT_FLOAT_EQ(norm_of(2), 2 * once);
  });
}

TEST(FsdpSteps, EvaluationBetweenStepsChangesNothing) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    ToyRank rank(world);
    const auto evaluate = [&] {
      rank.tape.no_grad([&] { return rank.model.loss(rank.tape, rank.input()); });
    };
    float norm = 0;
    for (int i = 0; i < 3; ++i) {
      rank.fsdp.begin_step();
      evaluate();
      rank.tape.backward(rank.model.loss(rank.tape, rank.input()));
      const float next = rank.fsdp.finish_step().value();
      EXPECT_TRUE(i == 0 || next == norm) << next << " " << norm;
      norm = next;
      evaluate();
    }
  });
}

TEST(FsdpSteps, GradientsAreReducedEveryMicroStepOrOnce) {
  constexpr int kMicroSteps = 3;
  std::vector<float> norms;
  for (const bool no_sync : {false, true}) {
    for (const auto& [strategy, unused] : {std::pair{"zero3", UnusedParameters::kZero},
                                           {"ddp", UnusedParameters::kZero},
                                           {"ddp", UnusedParameters::kSkip}}) {
      comm::run_ranks(2, {}, [&, strategy = strategy, unused = unused](ProcessGroup& world) {
        CollectiveLog log;
        LoggedGroup group(world, log);
        ToyRank rank(group,
                     {.placement = Placement::preset(strategy), .unused_parameters = unused});
        rank.fsdp.begin_step(kMicroSteps, {.no_sync = no_sync});
        for (int micro = 0; micro < kMicroSteps; ++micro) {
          if (micro > 0) rank.fsdp.next_micro_step({.no_sync = no_sync && micro + 1 < kMicroSteps});
          rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2}));
        }
        const float norm = rank.fsdp.finish_step().value();
        int num_reductions = 0;
        for (const std::string& line : log.take()) num_reductions += line.ends_with("gradient");
        EXPECT_EQ(num_reductions, (no_sync ? 1 : kMicroSteps) * 4) << strategy;
        if (world.rank() == 0) norms.push_back(norm);
      });
    }
  }
  for (const float norm : norms) EXPECT_NEAR(norm / norms[0], 1, 1e-5);
}

TEST(FsdpGradients, OfASkippedBlockAreZero) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    ToyRank rank(world);
    for (const bool skip : {false, true, false}) {
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.input(),
                                 skip ? std::vector<int>{0, 2} : std::vector<int>{0, 1, 2}));
      rank.fsdp.finish_step();
      const Flat& flat = rank.fsdp.units()[1]->flats().front();
      bool any = false;
      for (const Segment& s : flat.segments) {
        for (std::int64_t i = 0; i < s.numel; ++i) {
          any = any || flat.grad_sum.device().data<float>()[s.shard_begin + i] != 0;
        }
      }
      EXPECT_EQ(any, !skip);
    }
  });
}

// What is left out by the step after one that was given up has the gradient zero, though the
// reduction that was given up may still be at work.
TEST(FsdpSteps, AGradientThatWasGivenUpIsNotThatOfABlockLeftOut) {
  for (const char* strategy : {"zero3", "zero2", "ddp"}) {
    for (std::uint64_t seed = 1; seed < 6; ++seed) {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        ToyRank rank(world, {.placement = Placement::preset(strategy), .delay_seed = seed},
                     {.numel = 40, .poison = false});
        rank.fsdp.begin_step();
        rank.tape.backward(rank.loss());
        rank.fsdp.cancel_step();
        rank.fsdp.begin_step();
        EXPECT_EQ(rank.fsdp.finish_step().value(), 0) << strategy << " seed " << seed;
        for (const engine::Parameter* p : rank.fsdp.parameters()) {
          EXPECT_EQ(rank.fsdp.full_gradient(*p), std::vector<float>(40)) << p->name;
        }
      });
    }
  }
}

// One whose evaluation fails goes on.
TEST(FsdpSteps, AnEvaluationThatThrowsLeavesNoRegionOpen) {
  for (const char* strategy : {"zero3", "ddp"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, {.placement = Placement::preset(strategy)});
      const float before = rank.evaluate();
      auto& l = *rank.model.layers[1];
      const auto fails = [&]() -> Tensor {
        return rank.tape.region(rank.model.root, [&] {
          return rank.tape.region(l.block, [&]() -> Tensor { engine::fail("[toy] a bad batch"); });
        });
      };
      EXPECT_EQ(error_of<InvalidArgument>([&] { rank.tape.no_grad(fails); }), "[toy] a bad batch");
      rank.fsdp.parameters_changed();
      EXPECT_EQ(rank.evaluate(), before);
    });
  }
}

TEST(FsdpSteps, AStepMayBeGivenUpInsideARegionThatThrows) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    ToyRank rank(world);
    auto& outer = *rank.model.layers[1];
    auto& inner = *rank.model.layers[2];
    const auto fails = [&] {
      return rank.tape.region(outer.block, [&]() -> Tensor {
        rank.fsdp.cancel_step();
        engine::fail("[toy] a bad batch");
      });
    };
    rank.fsdp.begin_step();
    EXPECT_EQ(error_of<InvalidArgument>([&] { rank.tape.no_grad(fails); }), "[toy] a bad batch");
    // The parameters of the outer region stay while the inner one has its own.
    rank.tape.no_grad([&] {
      return rank.tape.region(outer.block, [&] {
        const Tensor x = rank.tape.region(inner.block, [&] {
          return affine(rank.tape, rank.input(), inner.weight, &inner.bias);
        });
        return affine(rank.tape, x, outer.weight, &outer.bias);
      });
    });
  });
}

TEST(FsdpSteps, AStepMayBeAbandonedAndBegunAgain) {
  for (const bool no_sync : {false, true}) {
    for (const char* strategy : {"zero3", "shard_grad_op", "zero2", "zero1", "ddp"}) {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        ToyRank rank(world, {.placement = Placement::preset(strategy)});
        const auto step = [&] {
          rank.fsdp.begin_step(2, {.no_sync = no_sync});
          for (int micro = 0; micro < 2; ++micro) {
            if (micro > 0) rank.fsdp.next_micro_step();
            rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2}));
          }
          return rank.fsdp.finish_step().value();
        };
        const float expected = step();
        for (const bool in_backward : {false, true}) {
          rank.fsdp.begin_step(2, {.no_sync = no_sync});
          rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2}));
          rank.fsdp.next_micro_step();
          auto& l = *rank.model.layers[0];
          const auto fails = [&] {
            const Tensor y = affine(rank.tape, rank.input(), l.weight, &l.bias);
            if (!in_backward) engine::fail("[toy] a bad batch");
            const Tensor z = rank.tape.empty(y.shape(), y.dtype(), "bad");
            rank.tape.record("bad", z, [](const Tensor&) { engine::fail("[toy] a bad batch"); });
            // Written, and then the step dies: the gradient must not be seen again.
            return sum(rank.tape, affine(rank.tape, z, l.weight, &l.bias));
          };
          EXPECT_EQ(error_of<InvalidArgument>(
                        [&] { rank.tape.backward(rank.tape.region(l.block, fails)); }),
                    "[toy] a bad batch");
          rank.tape.clear();
          EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.begin_step(); }),
                          {"cancel_step", "2 of 2"}));
          rank.fsdp.cancel_step();
          EXPECT_EQ(step(), expected) << strategy << " in backward " << in_backward;
        }
      });
    }
  }
}

TEST(FsdpSteps, GiveBackWhatWasGatheredWhenAbandoned) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group);
    std::vector<std::string> expected;
    for (const bool is_behind : {false, true}) {
      log.take();
      rank.fsdp.begin_step();
      const Tensor loss = forward(rank.tape, rank.model, rank.input(), {0, 1, 2});
      if (!is_behind) expected = log.take();
      if (is_behind) {
        EXPECT_EQ(log.take(), expected);
      }
      rank.fsdp.cancel_step();  // h.2 and the root are gathered
      rank.tape.clear();
    }
  });
}

// Counts the calls of agree() on itself and on what is split from it.
class AgreeingGroup : public LoggedGroup {
 public:
  struct Counts {
    CollectiveLog log;
    int groups = 0, calls = 0;
  };
  AgreeingGroup(ProcessGroup& inner, Counts& counts)
      : LoggedGroup(inner, counts.log), counts_(counts) {
    ++counts_.groups;
  }
  AgreeingGroup(std::unique_ptr<ProcessGroup> inner, Counts& counts)
      : LoggedGroup(std::move(inner), counts.log), counts_(counts) {
    ++counts_.groups;
  }
  void agree(const Stream& stream) override {
    ++counts_.calls;
    LoggedGroup::agree(stream);
  }
  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<AgreeingGroup>(LoggedGroup::make_part(color, key), counts_);
  }

 private:
  Counts& counts_;
};

// Where a backend does not compare each call as it is made, this is when ranks that differ are
// told.
TEST(FsdpSteps, CompareTheCallsOfEveryGroup) {
  for (const char* strategy : {"ddp", "zero3", "hsdp"}) {
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      AgreeingGroup::Counts counts;
      AgreeingGroup group(world, counts);
      ToyRank rank(group, {.placement = Placement::preset(strategy)});
      counts.calls = 0;
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2}));
      rank.fsdp.finish_step();
      EXPECT_EQ(counts.calls, counts.groups) << strategy;
    });
  }
}

TEST(FsdpSteps, AreRefusedOutOfOrder) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    ToyRank rank(world);
    EXPECT_THROW(rank.fsdp.finish_step(), InvalidArgument);
    EXPECT_THROW(rank.fsdp.next_micro_step(), InvalidArgument);
    EXPECT_THROW(rank.fsdp.begin_step(0), InvalidArgument);
    rank.fsdp.begin_step(2);
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.finish_step(); }), {"2", "1"}));
    rank.fsdp.next_micro_step();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.next_micro_step(); }), {"2"}));
    rank.fsdp.cancel_step();
    rank.fsdp.begin_step();
    forward(rank.tape, rank.model, rank.input(), {0, 1, 2});
    EXPECT_TRUE(
        has(error_of<InvalidArgument>([&] { rank.fsdp.finish_step(); }), {"backward", "h.0"}));
    rank.tape.clear();
  });
}

TEST(FsdpSteps, OtherMistakesAreNamed) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    ToyRank rank(world);
    const auto error = [](const std::function<void()>& fn) {
      return error_of<InvalidArgument>(fn);
    };
    const auto pass = [&] {
      rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2}));
    };
    EXPECT_TRUE(has(error(pass), {"begin_step"}));
    rank.fsdp.begin_step();
    pass();
    EXPECT_TRUE(has(error(pass), {"1 backward", "num_backwards"}));
    rank.fsdp.cancel_step();
    EXPECT_TRUE(has(error([&] { rank.fsdp.begin_step(1, {.no_sync = true}); }), {"no_sync"}));
    EXPECT_TRUE(has(error([&] { rank.fsdp.begin_step(1, {.num_backwards = 0}); }), {"0"}));
    rank.fsdp.begin_step();
    pass();
    EXPECT_TRUE(has(error([&] { rank.fsdp.full_gradient(rank.model.scale); }), {"finish_step"}));
    rank.fsdp.finish_step();
    rank.model.layers[1]->bias.trainable = false;
    EXPECT_TRUE(has(error([&] { rank.fsdp.begin_step(); }), {"trainable", "h.1.bias"}));
    rank.model.layers[1]->bias.trainable = true;
    rank.fsdp.begin_step();  // and an evaluation that forgot no_grad
    forward(rank.tape, rank.model, rank.input(), {0, 1, 2});
    EXPECT_TRUE(has(error([&] { rank.fsdp.finish_step(); }), {"no_grad"}));
    rank.tape.clear();
  });
}

TEST(FsdpSteps, AForwardThatWasRecordedBetweenThemIsNamed) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    for (const int num_before : {0, 1}) {
      ToyRank rank(world);
      const auto loss = [&] { return forward(rank.tape, rank.model, rank.input(), {2, 1, 0}); };
      const auto step = [&] {
        rank.fsdp.begin_step(2);
        for (int micro = 0; micro < 2; ++micro) {
          if (micro > 0) rank.fsdp.next_micro_step();
          const Tensor first = loss();
          rank.tape.no_grad(loss);
          rank.tape.backward({first, loss()});
        }
        return rank.fsdp.finish_step().value();
      };
      for (int i = 0; i < num_before; ++i) step();
      const Tensor evaluated = loss();
      EXPECT_EQ(error_of<InvalidArgument>(step),
                "[fsdp] expected no recorded forward from before this step, got one of 'h.0' that "
                "never ran backward: wrap evaluations in tape.no_grad(), or forget them with "
                "tape.clear()");
      rank.tape.clear();
      rank.fsdp.cancel_step();
      EXPECT_GT(step(), 0);
      // That nothing comes between makes it no part of the step either.
      const Tensor early = loss();
      rank.fsdp.begin_step();
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.tape.backward(early); }),
                      {"recorded in this step", "begin_step() before the forward", "no_grad"}));
      rank.fsdp.cancel_step();
      EXPECT_GT(step(), 0);
    }
  });
}

}  // namespace
}  // namespace tessera::shard
