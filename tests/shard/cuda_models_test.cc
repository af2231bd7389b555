// On GPUs, the bits of the CPU: parameters that are frozen and set free, edited and initialised
// whole, and kept gathered; and mixtures of experts with numbers that no sum rounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/cuda.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/summon.h"
#include "tests/shard/moe_model.h"
#include "tests/shard/toy_model.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using tessera::testing::ToyModel;

// Not 0 where these tests can run.
int num_gpus() {
  const int count = engine::kCudaBuilt ? engine::cuda::num_devices() : 0;
  EXPECT_GT(count, 0) << "these tests need a GPU";
  return std::max(count, 1);
}

// Steps between which parameters are frozen, set free and edited.
std::vector<float> train(int ranks, const FsdpOptions& options, int gpus) {
  std::vector<float> result;
  comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
    const Stream compute =
        gpus > 0 ? Stream::cuda("compute", world.rank() % gpus) : Stream::inline_cpu("compute");
    const Memory memory(compute, {.poison = true});
    Tape tape(memory, compute);
    ToyModel model(3, 300);
    model.layers[1]->weight.trainable = false;
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
    initialise(fsdp, [](const Parameter& p, std::span<float> values) {
      p.init.write(values.data(), 0, p.shape.numel(), p.name, 5);
      std::ranges::reverse(values);
    });
    Sgd optimizer(fsdp, {.momentum = 0.9});
    std::vector<float> mine;
    for (int step = 0; step < 6; ++step) {
      if (step == 2) model.layers[1]->weight.trainable = true;
      if (step == 4) model.layers[0]->bias.trainable = model.scale.trainable = false;
      if (step % 2 == 0 && step > 0) fsdp.trainable_changed();
      if (step == 3) {
        summon(fsdp, {&model.layers[2]->weight, &model.layers[1]->weight},
               [&](const std::vector<Tensor>& whole) {
                 engine::launch_assign_or_add(compute, whole[0], whole[1], true, "edit");
               },
               {.write_back = true});
      }
      fsdp.begin_step();
      std::vector<float> x(300);
      const engine::RandomStream random{
          7, static_cast<std::uint64_t>(step * world.size() + world.rank())};
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = random.normal(i);
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {300}, x)));
      mine.push_back(fsdp.finish_step().value());
      optimizer.step(1e-2);
      if (step % 2 == 0) continue;
      fsdp.keep_gathered([&] {  // in memory that the step has used
        for (const float value : {1.0f, 2.0f}) {
          const Tensor input = Tensor::from<float>(memory, {300}, std::vector<float>(300, value));
          const Tensor loss = tape.no_grad([&] { return model.loss(tape, input); });
          mine.push_back(engine::to_vector<float>(loss)[0]);
        }
      });
    }
    for (const Parameter* p : fsdp.parameters()) {
      for (const float v : fsdp.full_parameter(*p)) mine.push_back(v);
      if (!p->trainable) continue;
      for (const float v : optimizer.full_state(*p, "velocity")) mine.push_back(v);
    }
    if (world.rank() == 0) result = mine;
  });
  return result;
}

TEST(CudaModels, FreezingAndEditsHaveTheBitsOfTheCpu) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const int ranks : {1, 3}) {
      const FsdpOptions options{.placement = Placement::preset(strategy)};
      const std::vector<float> expected = train(ranks, options, 0);
      EXPECT_EQ(train(ranks, options, num_gpus()), expected) << strategy << " ranks " << ranks;
    }
  }
}

TEST(CudaModels, ExpertsHaveTheBitsOfTheCpu) {
  testing::MoeRun run{.ranks = 1, .accum = 4, .steps = 1, .model = {.k = 1, .exact = true}};
  const testing::MoeResult expected = testing::train_moe(run);
  run.num_gpus = num_gpus();
  run.ranks = 4;
  run.accum = 1;
  for (const int expert_ranks : {1, 4}) {
    run.expert_ranks = expert_ranks;
    const testing::MoeResult got = testing::train_moe(run);
    EXPECT_EQ(got.parameters, expected.parameters) << expert_ranks;
    // From the norms of the parts, each rounded.
    for (std::size_t i = 0; i < got.norms.size(); ++i) {
      EXPECT_NEAR(got.norms[i], expected.norms[i], 1e-6 * expected.norms[i]);
    }
  }
}

// With the host that a part of each update is made on, or without.
TEST(CudaModels, UpdatesOfExpertsAndTheRestAreSkippedTogether) {
  for (const double on_host : {0.0, 0.5}) {
    for (const auto fault : {testing::MoeFault::kDense, testing::MoeFault::kExperts}) {
      testing::MoeRun run{.ranks = 2,
                          .expert_ranks = 2,
                          .max_norm = 0.5,
                          .num_gpus = num_gpus(),
                          .fault = testing::MoeFault::kStepLeftOut};
      run.dense = {.non_finite = NonFinite::kSkip, .offload = {.optimizer = on_host}};
      run.experts = run.dense;
      const testing::MoeResult expected = testing::train_moe(run);
      run.fault = fault;
      const testing::MoeResult got = testing::train_moe(run);
      EXPECT_EQ(got.parameters, expected.parameters);
      EXPECT_EQ(got.norms, expected.norms);
      EXPECT_EQ(got.num_steps, 2);
      EXPECT_NE(got.not_finite.find(fault == testing::MoeFault::kDense ? "seen by rank 0"
                                                                       : "seen by rank 1"),
                std::string::npos)
          << got.not_finite;
    }
  }
}

// Where nothing throws before the norm is read.
TEST(CudaModels, AJointNormThatIsNotFiniteIsAnErrorOnEveryRank) {
  std::atomic<int> num_errors = 0;
  EXPECT_THROW(comm::run_ranks(2, {},
                               [&](comm::ProcessGroup& world) {
                                 const testing::MoeRun run{.ranks = 2,
                                                           .expert_ranks = 2,
                                                           .fault = testing::MoeFault::kExperts};
                                 testing::MoeResult result;
                                 std::mutex mutex;
                                 try {
                                   testing::train_moe_rank(
                                       world, Stream::cuda("compute", world.rank() % num_gpus()),
                                       run, result, mutex);
                                 } catch (const engine::InvalidArgument& error) {
                                   const std::string text = error.what();
                                   EXPECT_NE(text.find("[joint_norm]"), std::string::npos) << text;
                                   ++num_errors;
                                   throw;
                                 } catch (const engine::CommError&) {
                                   ++num_errors;  // the other rank has ended by its own already
                                   throw;
                                 }
                               }),
               engine::InvalidArgument);
  EXPECT_EQ(num_errors, 2);
}

}  // namespace
}  // namespace tessera::shard
