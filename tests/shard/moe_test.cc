// Mixtures of experts: the exchange and its gradient; experts in a group of one and in
// expert-parallel groups against one process; what their gradients are divided by; one norm.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "comm/meta.h"
#include "engine/meta.h"
#include "shard/hooks/hooks.h"
#include "shard/optimizer/adamw.h"
#include "tests/shard/moe_model.h"
#include "tests/testing/covering.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using tessera::testing::error_of;
using tessera::testing::has;
using tessera::testing::Moe;
using tessera::testing::MoeFault;
using tessera::testing::MoeResult;
using tessera::testing::MoeRun;
using tessera::testing::train_moe;

// y on rank r = block r of every rank, so d (sum_r w_r . y_r) / dx on rank s = block s of every w.
TEST(AllToAll, GradientsGoBackWhereTheyCameFrom) {
  for (const bool is_async : {false, true}) {
    for (const bool recompute : {false, true}) {
      comm::run_ranks(3, {}, [&](ProcessGroup& world) {
        const Stream compute = is_async ? Stream::worker_cpu("compute", {.delay_seed = 1})
                                        : Stream::inline_cpu("compute");
        const Memory memory({.poison = true});
        Tape tape(memory, compute);
        const auto value = [](int rank, std::size_t i) {
          return static_cast<float>(100 * rank) + static_cast<float>(i);
        };
        const auto of = [&](int rank) {
          std::vector<float> all(12);
          for (std::size_t i = 0; i < all.size(); ++i) all[i] = value(rank, i);
          return Tensor::from<float>(memory, {6, 2}, all, "x");
        };
        const Tensor x = of(world.rank()), w = of(world.rank() + 10);
        tape.watch(x);
        const engine::Block block{"block"};
        const Tensor y =
            tape.region(block, [x, &tape, &world] { return all_to_all(tape, world, x, "there"); },
                        {.recompute = recompute});
        const Tensor loss = tape.empty({}, DType::kF32, "loss");
        tape.record("loss", loss,
                    [&, y = y.without_data()](const Tensor&) { tape.pass_grad(y, w); });
        tape.backward(loss);
        compute.synchronize();
        for (int s = 0; s < 3; ++s) {
          for (std::size_t i = 0; i < 4; ++i) {
            const auto at = static_cast<std::size_t>(4 * s) + i;
            const auto block_of_mine = static_cast<std::size_t>(4 * world.rank()) + i;
            EXPECT_EQ(y.data<float>()[at], value(s, block_of_mine));
            EXPECT_EQ(tape.grad(x).data<float>()[at], value(s + 10, block_of_mine));
          }
        }
      });
    }
  }
}

TEST(AllToAll, RecordsNothingForDataAndIsTheIdentityAlone) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const Memory memory;
    Tape tape(memory, Stream::inline_cpu("compute"));
    const Tensor x = Tensor::zeros(memory, {4}, DType::kBF16, "x");
    all_to_all(tape, world, x, "data");
    EXPECT_EQ(tape.num_entries(), 0u);
    const auto alone = world.split(world.rank(), 0);
    tape.watch(x);
    EXPECT_EQ(all_to_all(tape, *alone, x, "alone").key(), x.key());
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      all_to_all(tape, world, Tensor::zeros(memory, {3}, DType::kF32, "odd"),
                                 "odd");
                    }),
                    {"[all_to_all]", "multiple of 2", "odd"}));
  });
}

void expect_equal(const MoeResult& got, const MoeResult& want, const std::string& what) {
  EXPECT_EQ(got.norms, want.norms) << what;
  EXPECT_EQ(got.num_steps, want.num_steps) << what;
  ASSERT_EQ(got.parameters.size(), want.parameters.size()) << what;
  for (std::size_t i = 0; i < got.parameters.size(); ++i) {
    EXPECT_EQ(got.parameters[i], want.parameters[i]) << what;
  }
}

void expect_near(const MoeResult& got, const MoeResult& want, const std::string& what) {
  ASSERT_EQ(got.parameters.size(), want.parameters.size()) << what;
  for (std::size_t i = 0; i < got.norms.size(); ++i) {
    EXPECT_NEAR(got.norms[i], want.norms[i], 1e-5 * want.norms[i]) << what;
  }
  for (std::size_t i = 0; i < got.parameters.size(); ++i) {
    EXPECT_EQ(got.parameters[i].first, want.parameters[i].first);
    for (std::size_t j = 0; j < got.parameters[i].second.size(); ++j) {
      ASSERT_NEAR(got.parameters[i].second[j], want.parameters[i].second[j], 1e-5)
          << what << " " << got.parameters[i].first;
    }
  }
}

std::vector<FsdpOptions> all_options() {
  std::vector<FsdpOptions> all;
  for (const char* strategy : {"zero3", "ddp", "zero1"}) {
    for (const int prefetch : {0, 1}) {
      all.push_back({.placement = Placement::preset(strategy), .prefetch = prefetch});
    }
  }
  return all;
}

// Where every rank has all experts, nothing is summed in another order.
TEST(Moe, OnEveryRankHasTheBitsOfOneProcess) {
  MoeRun run{.ranks = 1, .accum = 4, .max_norm = 0.5};
  const MoeResult expected = train_moe(run);
  EXPECT_GT(expected.norms[0], 0.5f) << "it is clipped";
  run.ranks = 4;
  run.accum = 1;
  for (const FsdpOptions& options : all_options()) {
    run.dense = run.experts = options;
    expect_equal(train_moe(run), expected, to_string(options.placement));
  }
}

// An expert adds up the tokens of all ranks in one product, so sums have another order; how they
// are cut and gathered changes no bit all the same.
TEST(Moe, InExpertParallelGroupsTrainsAsOneProcess) {
  MoeRun run{.ranks = 1, .accum = 4, .max_norm = 0.5};
  const MoeResult one_process = train_moe(run);
  run.ranks = 4;
  run.accum = 1;
  for (const int expert_ranks : {2, 4}) {
    run.expert_ranks = expert_ranks;
    run.dense = run.experts = {};
    const MoeResult expected = train_moe(run);
    expect_near(expected, one_process, "expert ranks " + std::to_string(expert_ranks));
    for (const FsdpOptions& options : all_options()) {
      for (const bool recompute : {false, true}) {
        MoeRun other = run;
        other.dense = other.experts = options;
        other.recompute = recompute;
        other.is_delayed = recompute;
        expect_equal(train_moe(other), expected, to_string(options.placement));
      }
    }
  }
}

// A checkpoint of two Fsdp with two optimizers, under every pair of choices: saved with what is
// offloaded, compressed or updated during backward, resumed under another strategy with none of the
// offload and overlap.
TEST(Moe, ResumedHasTheBitsOfTrainingThatWasNotInterrupted) {
  enum Choice : std::size_t { kStrategy, kHook, kExpertRanks, kUpdates, kOffload, kAsync, kAfter };
  const std::vector<std::string> strategies = {"ddp",           "zero1", "zero2",        "zero3",
                                               "shard_grad_op", "hsdp",  "hybrid_zero2", "hfsdp"};
  const auto count = static_cast<int>(strategies.size());
  const auto rows = testing::covering_rows({count, 3, 3, 3, 2, 2, count}).rows;
  std::map<std::tuple<int, int>, MoeResult> known;
  for (std::size_t number = 0; number < rows.size(); ++number) {
    if (testing::kIsSlow && number % 7 != 0) continue;
    const testing::CoveringRow& row = rows[number];
    const auto place = [&](MoeRun& run, Choice choice) {
      const std::string& strategy = strategies[static_cast<std::size_t>(row[choice])];
      run.dense.placement = run.experts.placement = Placement::preset(strategy);
    };
    MoeRun plain{.ranks = 4, .expert_ranks = 1 << row[kExpertRanks], .accum = 2, .steps = 4};
    constexpr std::array kHooks = {"none", "f16", "powersgd"};
    HookOptions hook;
    set_hook(hook, kHooks[static_cast<std::size_t>(row[kHook])]);
    hook.powersgd.start_step = 1;
    hook.powersgd.low_rank.min_compression_rate = 0;
    plain.dense.reducer = plain.experts.reducer = make_hook(hook);
    plain.dense.reducer_text = plain.experts.reducer_text = describe(hook);
    MoeResult& whole = known[{row[kHook], row[kExpertRanks]}];
    if (whole.parameters.empty()) whole = train_moe(plain);

    const testing::TempFolder folder;
    MoeRun before = plain, after = plain;
    before.folder = after.folder = folder / "c";
    before.steps = 2;
    before.saves_async = row[kAsync] == 1;
    place(before, kStrategy);
    place(after, kAfter);
    if (row[kUpdates] == 1) before.in_backward = UpdateGathers::kInterleaved;
    if (row[kUpdates] == 2) before.in_backward = UpdateGathers::kContiguous;
    if (row[kOffload] == 1) {
      before.dense.offload = {.gradients = 0.6, .optimizer = 0.6};
      before.experts.offload = {.gradients = 1, .optimizer = 0.3};
    }
    train_moe(before);
    MoeResult expected = whole;
    expected.norms.erase(expected.norms.begin(), expected.norms.begin() + 2);
    expect_equal(train_moe(after), expected,
                 "row " + std::to_string(number) + ": " + ::testing::PrintToString(row));
  }
}

// With numbers that no sum rounds the order does not matter, and every arrangement has the bits of
// one process: parameters, and the norm over all of them.
TEST(Moe, HasTheBitsOfOneProcessWhereNothingIsRounded) {
  MoeRun run{.ranks = 1, .accum = 4, .steps = 1, .model = {.k = 1, .exact = true}};
  const MoeResult expected = train_moe(run);
  for (const int expert_ranks : {1, 2, 4}) {
    for (const int accum : {1, 2}) {
      run.ranks = 4 / accum;
      run.accum = accum;
      if (expert_ranks > run.ranks) continue;
      run.expert_ranks = expert_ranks;
      expect_equal(train_moe(run), expected, "expert ranks " + std::to_string(expert_ranks));
    }
  }
}

// Where nothing runs: the exchanges, the groups of experts and the norm over both.
TEST(Moe, OnAMetaDeviceSendsAndHoldsWhatCpuRanksDo) {
  int row = 0;
  for (const int ranks : {1, 2, 4}) {
    for (const int expert_ranks : {1, 2, 4}) {
      if (expert_ranks > ranks) continue;
      for (const FsdpOptions& options : all_options()) {
        ++row;
        MoeRun run{.ranks = ranks,
                   .expert_ranks = expert_ranks,
                   .accum = 1 + row % 2,
                   .max_norm = row % 3 == 0 ? 0.0 : 0.5,
                   .recompute = row % 4 > 1,
                   .dense = options,
                   .experts = options};
        const MoeResult measured = train_moe(run);
        MoeResult planned;
        std::mutex mutex;
        for (int rank = 0; rank < ranks; ++rank) {
          const auto world = comm::make_meta_rank(rank, ranks);
          testing::train_moe_rank(*world, Stream::meta("compute", engine::DeviceKind::kCpu, {}),
                                  run, planned, mutex);
          for (int step = 0; step < run.steps; ++step) {
            const std::string what = std::to_string(rank) + " of " + std::to_string(ranks) +
                                     " ranks, " + std::to_string(expert_ranks) +
                                     " of them for experts, " + to_string(options.placement) +
                                     ", step " + std::to_string(step);
            const auto at = static_cast<std::size_t>(step);
            const testing::MoeBooks &want = measured.books.at(rank).at(at),
                                    &got = planned.books.at(rank).at(at);
            EXPECT_EQ(got.traffic, want.traffic) << what;
            EXPECT_EQ(got.memory.peak_nbytes, want.memory.peak_nbytes) << what;
            EXPECT_EQ(got.memory.peak_total_nbytes, want.memory.peak_total_nbytes) << what;
            EXPECT_EQ(got.memory.current_nbytes, want.memory.current_nbytes) << what;
          }
        }
      }
    }
  }
}

// All of it in one Fsdp, whose norm is that over all parameters.
TEST(JointNorm, IsThatOfOneFsdp) {
  comm::run_ranks(4, {}, [](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    const auto alone = world.split(world.rank(), 0);
    const auto batch = [&](Moe& model) {
      std::vector<float> values(12 * 8);
      const engine::RandomStream random{7, static_cast<std::uint64_t>(world.rank())};
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {12, 8}, values),
                               Tensor::zeros(memory, {12}, DType::kI32), false));
    };
    Moe whole({}, *alone), split({}, *alone);
    Fsdp all(world, memory, compute, whole.expert_blocks(), &whole.root, {});
    all.begin_step();
    batch(whole);
    const float expected = all.finish_step().value();
    for (const std::string& strategy : Placement::preset_names()) {
      const FsdpOptions options{.placement = Placement::preset(strategy)};
      Fsdp dense(world, memory, compute, {}, &split.root, options);
      Fsdp experts(world, memory, compute, split.expert_blocks(), nullptr, options);
      dense.begin_step();
      experts.begin_step();
      batch(split);
      const GradNorm dense_norm = dense.finish_step(), expert_norm = experts.finish_step();
      const std::vector<NormPart> parts = {{dense, dense_norm}, {experts, expert_norm}};
      EXPECT_EQ(joint_norm(world, parts).value(), expected) << strategy;
      EXPECT_LT(dense_norm.value(), expected);
    }
  });
}

// Dense parameters and experts, on all ranks: whoever holds the gradient that is not finite.
TEST(JointNorm, SkipsTheUpdatesOfAllPartsOnAllRanksTogether) {
  for (const std::string& strategy : Placement::preset_names()) {
    for (const int expert_ranks : {1, 2, 4}) {
      for (const MoeFault fault : {MoeFault::kDense, MoeFault::kExperts}) {
        MoeRun run{.ranks = 4,
                   .expert_ranks = expert_ranks,
                   .max_norm = fault == MoeFault::kDense ? 0.5 : 0.0,
                   .fault = MoeFault::kStepLeftOut};
        run.dense = {.placement = Placement::preset(strategy), .non_finite = NonFinite::kSkip};
        run.experts = run.dense;
        const MoeResult expected = train_moe(run);
        EXPECT_EQ(expected.num_steps, 2);
        EXPECT_EQ(expected.not_finite, "");
        run.fault = fault;
        const MoeResult got = train_moe(run);
        const std::string what = strategy + ", expert ranks " + std::to_string(expert_ranks) +
                                 (fault == MoeFault::kDense ? ", dense" : ", experts");
        expect_equal(got, expected, what);
        EXPECT_TRUE(
            has(got.not_finite,
                {fault == MoeFault::kDense ? "in" : "expert.",
                 fault == MoeFault::kDense ? ", seen by rank 0"
                                           : ", seen by rank " + std::to_string(expert_ranks - 1)}))
            << what;
      }
    }
  }
}

// Groups of one each: nobody else learns of it by another way.
TEST(JointNorm, OfWhatIsNotFiniteSaysSoOnEveryRank) {
  comm::run_ranks(3, {}, [](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    const auto alone = world.split(world.rank(), 0);
    Moe model({}, *alone);
    Fsdp dense(*alone, memory, compute, {}, &model.root, {.non_finite = NonFinite::kSkip});
    Fsdp experts(*alone, memory, compute, model.expert_blocks(), nullptr,
                 {.non_finite = NonFinite::kSkip});
    AdamW dense_optimizer(dense, {}), expert_optimizer(experts, {});
    const auto values_of = [](Fsdp& fsdp, Optimizer& optimizer) {
      std::vector<std::vector<float>> all;
      for (const engine::Parameter* p : fsdp.parameters()) {
        all.push_back(fsdp.full_parameter(*p));
        for (const char* state : {"m", "v"}) all.push_back(optimizer.full_state(*p, state));
      }
      return all;
    };
    for (const bool is_bad : {true, false}) {
      const auto dense_before = values_of(dense, dense_optimizer);
      const auto experts_before = values_of(experts, expert_optimizer);
      dense.begin_step();
      experts.begin_step();
      std::vector<float> values(96, 1.0f);
      if (is_bad && world.rank() == 1) values[5] = std::numeric_limits<float>::infinity();
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {12, 8}, values),
                               Tensor::zeros(memory, {12}, DType::kI32), false));
      const GradNorm dense_norm = dense.finish_step(), expert_norm = experts.finish_step();
      EXPECT_EQ(dense_norm.not_finite().empty(), !is_bad || world.rank() != 1);
      const std::vector<NormPart> parts = {{dense, dense_norm}, {experts, expert_norm}};
      const JointNorm norm = joint_norm(world, parts);
      if (is_bad) {
        EXPECT_TRUE(has(norm.not_finite(), {"in, seen by rank 1"}));
        EXPECT_TRUE(has(error_of<InvalidArgument>([&] { static_cast<void>(norm.value()); }),
                        {"[joint_norm]", "expected finite gradients", "in, seen by rank 1"}));
      } else {
        EXPECT_EQ(norm.not_finite(), "");
        EXPECT_GT(norm.value(), 0);
      }
      dense_optimizer.step(0.1, norm, 1);
      expert_optimizer.step(0.1, norm, 1);
      EXPECT_EQ(dense_optimizer.num_steps(), is_bad ? 0 : 1);
      EXPECT_EQ(expert_optimizer.num_steps(), is_bad ? 0 : 1);
      EXPECT_EQ(values_of(dense, dense_optimizer) == dense_before, is_bad);
      EXPECT_EQ(values_of(experts, expert_optimizer) == experts_before, is_bad);
    }
  });
}

TEST(JointNorm, OfWhatIsNotFiniteIsAnErrorOnEveryRankUnlessAllPartsSkip) {
  comm::run_ranks(3, {}, [](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    const auto alone = world.split(world.rank(), 0);
    Moe model({}, *alone);
    // One part of one rank throws, and it is another's gradient that is not finite.
    const NonFinite policy = world.rank() == 2 ? NonFinite::kThrow : NonFinite::kSkip;
    Fsdp dense(*alone, memory, compute, {}, &model.root, {.non_finite = NonFinite::kSkip});
    Fsdp experts(*alone, memory, compute, model.expert_blocks(), nullptr, {.non_finite = policy});
    dense.begin_step();
    experts.begin_step();
    tape.backward(model.loss(tape, Tensor::from<float>(memory, {12, 8}, std::vector(96, 1.0f)),
                             Tensor::zeros(memory, {12}, DType::kI32), false));
    if (world.rank() == 1) testing::spoil_gradients(dense);
    const GradNorm dense_norm = dense.finish_step(), expert_norm = experts.finish_step();
    const std::vector<NormPart> parts = {{dense, dense_norm}, {experts, expert_norm}};
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { joint_norm(world, parts); }),
                    {"[joint_norm]", "in, seen by rank 1"}))
        << "rank " << world.rank();
  });
}

TEST(JointNorm, ARankThatUpdatesWhereOthersSkipIsAnError) {
  const std::string error = error_of<engine::Error>([] {
    comm::run_ranks(2, {}, [](ProcessGroup& world) {
      const Memory memory;
      const Stream compute = Stream::inline_cpu("compute");
      Tape tape(memory, compute);
      const auto alone = world.split(world.rank(), 0);
      Moe model({}, *alone);
      Fsdp fsdp(world, memory, compute, model.expert_blocks(), &model.root,
                {.non_finite = NonFinite::kSkip});
      Sgd optimizer(fsdp, {});
      fsdp.begin_step();
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {12, 8}, std::vector(96, 1.0f)),
                               Tensor::zeros(memory, {12}, DType::kI32), false));
      testing::spoil_gradients(fsdp);
      const GradNorm own_norm = fsdp.finish_step();
      const std::vector<NormPart> parts = {{fsdp, own_norm}};
      const JointNorm norm = joint_norm(world, parts);
      world.rank() == 0 ? optimizer.step(0.1, norm, 0) : optimizer.step(0.1);
    });
  });
  EXPECT_TRUE(has(error, {"optimizer step 1", ", skipped"}));
}

TEST(JointNorm, WithTheDefaultWhatIsNotFiniteEndsTrainingOnEveryRank) {
  std::atomic<int> num_errors = 0;
  const std::string error = error_of<InvalidArgument>([&] {
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      try {
        MoeResult result;
        std::mutex mutex;
        testing::train_moe_rank(world, Stream::inline_cpu("compute"),
                                {.ranks = 4, .expert_ranks = 4, .fault = MoeFault::kExperts},
                                result, mutex);
      } catch (const engine::Error&) {
        ++num_errors;
        throw;
      }
    });
  });
  EXPECT_TRUE(has(error, {"expected finite gradients", "expert.3.w1"}));
  EXPECT_EQ(num_errors, 4);
}

// The gradient of an expert in a group of one is the sum over the tokens of all ranks: what it is
// divided by is said, not guessed.
TEST(JointNorm, RefusesMeansOverDifferentNumbersOfBatches) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    const auto alone = world.split(world.rank(), 0);
    for (const int mean_ranks : {0, 2}) {
      Moe model({}, world);
      Fsdp dense(world, memory, compute, {}, &model.root, {});
      Fsdp experts(*alone, memory, compute, model.expert_blocks(), nullptr,
                   {.mean_ranks = mean_ranks});
      EXPECT_EQ(experts.mean_scale(), 1);
      dense.begin_step();
      experts.begin_step();
      EXPECT_EQ(experts.mean_scale(), mean_ranks == 0 ? 1 : 0.5);
      const Tensor x = Tensor::from<float>(memory, {12, 8}, std::vector<float>(96, 1.0f));
      tape.backward(model.loss(tape, x, Tensor::zeros(memory, {12}, DType::kI32), false));
      const GradNorm dense_norm = dense.finish_step(), expert_norm = experts.finish_step();
      const std::vector<NormPart> parts = {{dense, dense_norm}, {experts, expert_norm}};
      if (mean_ranks == 0) {
        EXPECT_TRUE(has(error_of<InvalidArgument>([&] { joint_norm(world, parts); }),
                        {"[joint_norm]", "got gradients times 0.5 and 1"}));
      } else {
        EXPECT_GT(joint_norm(world, parts).value(), 0);
        Sgd(dense, {}).step(0);
        EXPECT_TRUE(
            has(error_of<InvalidArgument>([&] { experts.join(1); }), {"mean_ranks", "got 2"}));
      }
    }
  });
}

}  // namespace
}  // namespace tessera::shard
