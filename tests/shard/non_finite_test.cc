// Steps whose gradient is not finite: skipped on all ranks alike, and who is named.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/hooks/hooks.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using testing::ToyRank;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Rank : ToyRank {
  Rank(ProcessGroup& world, const FsdpOptions& options)
      : ToyRank(world, options, {.numel = 50, .poison = false}) {}
  void backward(float first) { tape.backward(model.loss(tape, input(0.25f, first))); }
};

TEST(NonFinite, AStepIsSkippedAsIfItHadNotBeen) {
  for (const std::string& name : Placement::preset_names()) {
    std::optional<std::vector<float>> expected;
    for (const bool has_bad_step : {false, true}) {
      comm::run_ranks(4, {}, [&](ProcessGroup& world) {
        Rank rank(world, {.placement = Placement::preset(name), .non_finite = NonFinite::kSkip});
        AdamW adamw(rank.fsdp, {});
        for (int step = 0; step < 4; ++step) {
          const bool is_bad = step == 2;
          if (is_bad && !has_bad_step) continue;
          rank.fsdp.begin_step();
          rank.backward(is_bad && world.rank() == 1 ? std::nanf("") : 0.5f);
          const GradNorm norm = rank.fsdp.finish_step();
          EXPECT_EQ(norm.not_finite().empty(), !is_bad);
          if (is_bad) {
            EXPECT_TRUE(has(error_of<InvalidArgument>([&] { static_cast<void>(norm.value()); }),
                            {"expected finite gradients", "h.0.weight"}));
          }
          adamw.step(0.1, norm, 1);
        }
        EXPECT_EQ(adamw.num_steps(), 3);
        std::vector<float> mine;
        for (const engine::Parameter* p : rank.fsdp.parameters()) {
          for (const std::vector<float>& values :
               {rank.fsdp.full_parameter(*p), adamw.full_state(*p, "m")}) {
            mine.insert(mine.end(), values.begin(), values.end());
          }
        }
        if (world.rank() != 0) return;
        if (!expected) expected = mine;
        EXPECT_EQ(mine, *expected) << name;
      });
    }
  }
}

TEST(NonFinite, AStepInPartsIsSkippedToo) {
  auto groups = comm::make_threads_world(1);
  Rank rank(*groups.front(), {.non_finite = NonFinite::kSkip});
  Sgd sgd(rank.fsdp, {});
  const std::vector<float> before = rank.fsdp.full_parameter(rank.model.scale);
  rank.fsdp.begin_step();
  rank.backward(kInf);
  sgd.begin_step(0.1, rank.fsdp.finish_step(), 0);
  for (const auto& unit : rank.fsdp.units()) sgd.step_unit(*unit, rank.tape.stream());
  sgd.end_step();
  EXPECT_EQ(rank.fsdp.full_parameter(rank.model.scale), before);
  EXPECT_EQ(sgd.num_steps(), 0);
}

// The first in the order of micro-steps, parameters and ranks: the gradient of h.0.weight is dy x.
TEST(NonFinite, ACheckNamesRankAndMicroStep) {
  for (const std::string name : {"ddp", "zero3"}) {
    comm::run_ranks(3, {}, [&](ProcessGroup& world) {
      Rank rank(world, {.placement = Placement::preset(name), .check_gradients = true});
      for (int step = 0; step < 2; ++step) {
        rank.fsdp.begin_step(3);
        for (int micro = 0; micro < 3; ++micro) {
          if (micro > 0) rank.fsdp.next_micro_step();
          rank.backward(micro > step && world.rank() > 0 ? kInf : 0.5f);
        }
        // What the first step found is forgotten in the second.
        EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.finish_step(); }),
                        {step == 0 ? "got NaN or infinity (h.0.weight, rank 1, micro-step 2)"
                                   : "got NaN or infinity (h.0.weight, rank 1, micro-step 3)"}))
            << name;
      }
      rank.fsdp.begin_step();
      rank.backward(0.5f);
      rank.fsdp.finish_step();
    });
  }
}

// Who is looked for before gradients are sent, whoever they go to and however.
TEST(NonFinite, ACheckNamesTheRankUnderEveryStrategyAndHook) {
  for (const std::string& strategy : Placement::preset_names()) {
    for (const char* hook_name : {"none", "bf16", "f16", "powersgd"}) {
      for (const bool early : {false, true}) {
        HookOptions hook;
        set_hook(hook, hook_name);
        hook.powersgd.start_step = 0;
        FsdpOptions options{.placement = Placement::preset(strategy), .check_gradients = true};
        options.reducer = make_hook(hook);
        options.reducer_text = describe(hook);
        const std::string error = error_of<InvalidArgument>([&] {
          comm::run_ranks(4, {}, [&](ProcessGroup& world) {
            Rank rank(world, options);
            Sgd sgd(rank.fsdp, {});
            if (early) sgd.step_in_backward(0.1);
            rank.fsdp.begin_step(3);
            for (int micro = 0; micro < 3; ++micro) {
              if (micro > 0) rank.fsdp.next_micro_step();
              rank.backward(micro == 1 && world.rank() == 3 ? kInf : 0.5f);
            }
            rank.fsdp.finish_step();
          });
        });
        EXPECT_TRUE(has(error, {"got NaN or infinity (h.0.weight, rank 3, micro-step 2)"}))
            << strategy << ", " << hook_name << (early ? ", during backward" : "");
      }
    }
  }
}

// Without communication in between, what is looked at is the sum.
TEST(NonFinite, ACheckNamesTheMicroStepThatWasReduced) {
  for (const char* strategy : {"ddp", "zero3", "hsdp"}) {
    const std::string error = error_of<InvalidArgument>([&] {
      comm::run_ranks(4, {}, [&](ProcessGroup& world) {
        const FsdpOptions options{.placement = Placement::preset(strategy),
                                  .check_gradients = true};
        Rank rank(world, options);
        for (int micro = 0; micro < 3; ++micro) {
          const MicroStep micro_step{.no_sync = micro < 2};
          micro == 0 ? rank.fsdp.begin_step(3, micro_step) : rank.fsdp.next_micro_step(micro_step);
          rank.backward(micro == 1 && world.rank() == 2 ? kInf : 0.5f);
        }
        rank.fsdp.finish_step();
      });
    });
    EXPECT_TRUE(has(error, {"got NaN or infinity (h.0.weight, rank 2, micro-step 3)"})) << strategy;
  }
}

TEST(NonFinite, ASumThatOverflowsIsNobodysFault) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    Rank rank(world, {.non_finite = NonFinite::kSkip, .check_gradients = true});
    for (const engine::Parameter* p :
         {&rank.model.scale, &rank.model.layers[0]->weight, &rank.model.layers[1]->weight,
          &rank.model.layers[2]->weight}) {
      rank.fsdp.load(*p, std::vector<float>(50, 1.0f));
    }
    rank.fsdp.parameters_changed();
    rank.fsdp.begin_step();
    rank.backward(1.5e38f);  // the gradient of the scale is twice that, on each of two ranks
    EXPECT_EQ(rank.fsdp.finish_step().not_finite(), "scale");
  });
}

TEST(NonFinite, ACheckReadsBf16) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    Rank rank(world, {.precision = {.accumulate = engine::DType::kBF16}, .check_gradients = true});
    rank.fsdp.begin_step();
    rank.backward(world.rank() == 0 ? std::nanf("") : 0.5f);
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.finish_step(); }),
                    {"(h.0.weight, rank 0, micro-step 1)"}));
  });
}

TEST(NonFinite, RanksAgreeOnWhatTheyDo) {
  const auto message = [](auto change) {
    return error_of<engine::Error>([&] {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        FsdpOptions options;
        if (world.rank() == 1) change(options);
        Rank rank(world, options);
      });
    });
  };
  EXPECT_TRUE(has(message([](FsdpOptions& o) { o.check_gradients = true; }),
                  {"check_gradients true", "check_gradients false"}));
  EXPECT_TRUE(has(message([](FsdpOptions& o) { o.non_finite = NonFinite::kSkip; }),
                  {"non_finite skipped", "non_finite thrown"}));
}

TEST(NonFinite, AnUpdateDuringBackwardCannotSkip) {
  auto groups = comm::make_threads_world(1);
  Rank rank(*groups.front(), {.non_finite = NonFinite::kSkip});
  Sgd sgd(rank.fsdp, {});
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { sgd.step_in_backward(0.1); }), {"NonFinite::kThrow"}));
}

}  // namespace
}  // namespace tessera::shard
