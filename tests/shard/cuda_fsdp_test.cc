// Fsdp on GPUs: the bits of the CPU for every choice, the same collectives in the same order, no
// host synchronisation in a step, and gradients that are not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/meta.h"
#include "engine/copy.h"
#include "engine/cuda.h"
#include "engine/elementwise.h"
#include "engine/meta.h"
#include "shard/optimizer/elementwise_optimizer.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::Tensor;
using testing::collectives_of_step;
using testing::error_of;
using testing::ToyModel;
using testing::train;
using testing::Training;

// Not 0 where these tests can run.
int num_gpus() {
  const int count = engine::kCudaBuilt ? engine::cuda::num_devices() : 0;
  EXPECT_GT(count, 0) << "these tests need a GPU";
  return std::max(count, 1);
}

void expect_bits_of_the_cpu(Training run) {
  const std::string what = to_string(run.options.placement) + " ranks " +
                           std::to_string(run.ranks) + " prefetch " +
                           std::to_string(run.options.prefetch);
  const std::vector<float> expected = train(run);
  for (const int gpus : {1, num_gpus()}) {
    run.num_gpus = gpus;
    const std::vector<float> got = train(run);
    const auto at = std::ranges::mismatch(got, expected).in1 - got.begin();
    EXPECT_EQ(at, std::ssize(expected))
        << what << " on " << gpus << " GPUs: " << got[static_cast<std::size_t>(at)] << " for "
        << expected[static_cast<std::size_t>(at)];
  }
}

TEST(CudaFsdp, EveryStrategyHasTheBitsOfTheCpu) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
      for (const int prefetch : {0, 1, 2}) {
        if (testing::kIsSlow && prefetch != ranks % 3) continue;
        expect_bits_of_the_cpu(
            {.ranks = ranks,
             .poison = true,
             .options = {.placement = Placement::preset(strategy), .prefetch = prefetch}});
      }
    }
  }
}

TEST(CudaFsdp, EveryOptionHasTheBitsOfTheCpu) {
  const Precision half{DType::kBF16, DType::kBF16, DType::kF32};
  expect_bits_of_the_cpu({.accum = 3, .recompute = true, .max_norm = 0.5});
  expect_bits_of_the_cpu({.accum = 2, .adamw = true, .max_norm = 0.5, .delay_seed = 5});
  expect_bits_of_the_cpu({.adamw = true, .options = {.precision = half}});
  expect_bits_of_the_cpu(
      {.accum = 2, .options = {.precision = {DType::kBF16, DType::kF32, DType::kBF16}}});
  expect_bits_of_the_cpu({.accum = 2, .no_sync = true});
  expect_bits_of_the_cpu({.blocks = 5, .numel = 77, .options = {.unit_min_numel = 300}});
  expect_bits_of_the_cpu(
      {.blocks = 5,
       .numel = 77,
       .options = {.placement = Placement::preset("zero1"), .bucket_nbytes = 1300}});
}

TEST(CudaFsdp, OffloadHasTheBitsOfTheCpu) {
  int pair = 0;
  for (const OffloadOptions& offload :
       {OffloadOptions{.parameters = 1, .gradients = 1, .optimizer = 1},
        OffloadOptions{.parameters = 0.4, .gradients = 0.7, .optimizer = 0.2, .threads = 2},
        OffloadOptions{.parameters = 0.2, .gradients = 0.4, .optimizer = 0.7},
        OffloadOptions{.parameters = 1}, OffloadOptions{.gradients = 1},
        OffloadOptions{.optimizer = 1}}) {
    for (const char* strategy : {"zero3", "zero1", "ddp"}) {
      const int nth_offload = pair / 3, nth_strategy = pair++ % 3;
      if (testing::kIsSlow && nth_strategy != nth_offload % 3) continue;
      for (const bool is_bf16 : {false, true}) {
        if (testing::kIsSlow && is_bf16 != (offload.optimizer < 1)) continue;
        Training run{.accum = 2, .blocks = 4, .numel = 700, .max_norm = 0.5, .poison = true};
        run.options.placement = Placement::preset(strategy);
        run.options.precision.param = is_bf16 ? DType::kBF16 : DType::kF32;
        run.options.offload = offload;
        run.adamw = is_bf16;
        if (!is_bf16 && offload.parameters > 0 && std::string(strategy) != "zero3") continue;
        expect_bits_of_the_cpu(run);
        run.delay_seed = 3;
        run.max_norm = 0;
        run.in_backward = UpdateGathers::kInterleaved;
        expect_bits_of_the_cpu(run);
      }
    }
  }
}

// p -= g, on the host once it is told.
class Held : public ElementwiseOptimizer {
 public:
  Held(Fsdp& fsdp, std::shared_future<void> told)
      : ElementwiseOptimizer(fsdp, {.name = "held", .states = {"m"}, .groups = {{.name = "all"}}}),
        told_(std::move(told)) {}
  ~Held() override { end_updates(); }

 private:
  void update(const Target& target, const engine::Stream& stream) override {
    stream.launch({.name = "held"}, [told = told_, p = target.master, g = target.grad_sum] {
      EXPECT_EQ(told.wait_for(std::chrono::seconds(2)), std::future_status::ready);
      const auto values = p.span<float>();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] -= g.span<float>()[i];
    });
  }
  std::shared_future<void> told_;
};

// Update, forward and backward are all launched before the host has updated anything.
TEST(CudaFsdp, WhoLaunchesNeverWaitsForTheHostThatUpdates) {
  for (const bool in_backward : {false, true}) {
    std::vector<float> result[2];
    for (const bool is_held : {false, true}) {
      comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
        const auto compute = engine::Stream::cuda("compute", 0);
        const engine::Memory memory(compute);
        engine::Tape tape(memory, compute);
        ToyModel model(3, 300);
        Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
                  {.offload = {.parameters = 1, .gradients = 1, .optimizer = 1}});
        std::promise<void> go;
        if (!is_held) go.set_value();
        Held optimizer(fsdp, go.get_future().share());
        const Tensor x = Tensor::zeros(memory, {300}, DType::kF32, "x");
        for (int step = 0; step < 2; ++step) {
          if (in_backward) optimizer.step_in_backward(0.1);
          fsdp.begin_step();
          tape.backward(model.loss(tape, x));
          const GradNorm norm = fsdp.finish_step();
          if (!in_backward) optimizer.step(0.1, {});
          if (!is_held) continue;
          // The first step ends without the host, norm and all; the second needs what it updates.
          const engine::Event end = compute.record("step");
          const auto late = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
          while (!end.reached() && std::chrono::steady_clock::now() < late) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          EXPECT_EQ(end.reached(), step == 0);
          EXPECT_EQ(norm.is_known(), step == 0);
        }
        if (is_held) go.set_value();
        for (const engine::Parameter* p : fsdp.parameters()) {
          const std::vector<float> values = fsdp.full_parameter(*p);
          result[is_held].insert(result[is_held].end(), values.begin(), values.end());
        }
      });
    }
    EXPECT_EQ(result[0], result[1]);
  }
}

TEST(CudaFsdp, UpdatesInBackwardHaveTheBitsOfTheCpu) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const auto gathers : {UpdateGathers::kInterleaved, UpdateGathers::kContiguous}) {
      expect_bits_of_the_cpu({.accum = 2,
                              .adamw = true,
                              .poison = true,
                              .delay_seed = 5,
                              .options = {.placement = Placement::preset(strategy)},
                              .in_backward = gathers});
    }
  }
}

// More of them than threads that prepare them.
TEST(CudaFsdp, ManyGroupsHaveTheBitsOfTheCpu) {
  Training run{
      .ranks = 2, .blocks = 130, .numel = 40, .adamw = true, .many_groups = true, .max_norm = 0.5};
  expect_bits_of_the_cpu(run);
  run.blocks = 40;
  run.options.offload = {.gradients = 0.5, .optimizer = 0.5};
  expect_bits_of_the_cpu(run);
  run.options.offload = {};
  run.blocks = 20;
  run.max_norm = 0;
  for (const char* strategy : {"zero1", "ddp"}) {
    run.options.placement = Placement::preset(strategy);
    run.in_backward = std::nullopt;
    expect_bits_of_the_cpu(run);
    run.in_backward = UpdateGathers::kInterleaved;
    expect_bits_of_the_cpu(run);
  }
}

// What groups take on the device is there before the first step, and a device that is not there
// says as much.
TEST(CudaFsdp, ManyGroupsTakeMemoryOnceAndAsPlanned) {
  constexpr int kBlocks = 100;
  const auto books_of = [](const engine::Stream& compute, bool has_groups) {
    std::vector<engine::MemoryStats> books;
    const std::unique_ptr<comm::ProcessGroup> world =
        compute.device().is_meta ? comm::make_meta_rank(0, 1)
                                 : std::move(comm::make_threads_world(1).front());
    const engine::Memory memory(compute);
    engine::Tape tape(memory, compute);
    ToyModel model(kBlocks, 40);
    Fsdp fsdp(*world, memory, compute, model.blocks(), &model.root, {});
    AdamW optimizer(
        fsdp, {.groups = has_groups ? testing::groups_of(model) : std::vector<ParameterGroup>{}});
    books.push_back(memory.stats());
    for (int step = 0; step < 4; ++step) {
      if (has_groups && step > 0) optimizer.group("group 7").lr_scale *= 0.5;
      fsdp.begin_step();
      tape.backward(model.loss(tape, Tensor::zeros(memory, {40}, DType::kF32, "x")));
      optimizer.step(1e-3, fsdp.finish_step(), 1);
      compute.synchronize();
      books.push_back(memory.stats());
    }
    return books;
  };
  const auto nbytes = [](const std::vector<engine::MemoryStats>& books, std::size_t step) {
    return books[step].current_nbytes[static_cast<std::size_t>(engine::Category::kOptimizer)];
  };
  const auto gpu = engine::Stream::cuda("compute", 0);
  const auto plain = books_of(gpu, false), many = books_of(gpu, true);
  EXPECT_GE(nbytes(many, 0) - nbytes(plain, 0), 2 * kBlocks * std::int64_t{16 + 24});
  const auto planned =
      books_of(engine::Stream::meta("compute", engine::DeviceKind::kCuda, {}), true);
  for (std::size_t step = 0; step < many.size(); ++step) {
    EXPECT_EQ(nbytes(many, step), nbytes(many, 0));
    EXPECT_EQ(many[step].current_nbytes, planned[step].current_nbytes);
    EXPECT_EQ(many[step].peak_nbytes, planned[step].peak_nbytes);
    EXPECT_EQ(many[step].peak_total_nbytes, planned[step].peak_total_nbytes);
    EXPECT_EQ(many[step].num_reservations - many[0].num_reservations,
              plain[step].num_reservations - plain[0].num_reservations);
  }
}

// Left out in some steps, used again in others, by an optimizer that would not leave them alone.
TEST(CudaFsdp, UnusedParametersHaveTheBitsOfTheCpu) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const auto unused : {UnusedParameters::kZero, UnusedParameters::kSkip}) {
      expect_bits_of_the_cpu(
          {.steps = 4,
           .rests = true,
           .adamw = true,
           .options = {.placement = Placement::preset(strategy), .unused_parameters = unused}});
    }
  }
}

TEST(CudaFsdp, CollectivesHaveTheOrderOfTheCpu) {
  for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
    for (const int prefetch : {0, 1, 2}) {
      Training run{.blocks = 4,
                   .options = {.placement = Placement::preset(strategy), .prefetch = prefetch}};
      const std::vector<std::string> expected = collectives_of_step(1, run);
      run.num_gpus = num_gpus();
      EXPECT_EQ(collectives_of_step(1, run), expected) << strategy << " prefetch " << prefetch;
    }
  }
}

// One rank and one scale: loss = sum(scale^2 x).
struct OneRank {
  explicit OneRank(comm::ProcessGroup& world, float first, const OffloadOptions& offload = {})
      : model(0, 4),
        fsdp(world, memory, compute, {}, &model.root, {.offload = offload}),
        optimizer(fsdp, {}) {
    fsdp.load(model.scale, std::vector<float>(4, 1.0f));
    fsdp.parameters_changed();
    backward(first);
  }
  void backward(float first) {
    fsdp.begin_step();
    const std::vector<float> x = {first, 1, 1, 1};
    tape.backward(model.loss(tape, Tensor::from<float>(memory, {4}, x, "x")));
  }
  engine::Stream compute = engine::Stream::cuda("compute", 0);
  engine::Memory memory{compute};
  engine::Tape tape{memory, compute};
  ToyModel model;
  Fsdp fsdp;
  AdamW optimizer;
};

TEST(CudaFsdp, AGradientThatIsNotFiniteChangesNothingAndIsNamed) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      OneRank rank(world, bad);
      const GradNorm norm = rank.fsdp.finish_step();
      rank.optimizer.step(0.1, norm, 1);
      EXPECT_EQ(rank.fsdp.full_parameter(rank.model.scale), std::vector<float>(4, 1.0f));
      const std::string message =
          error_of<engine::InvalidArgument>([&] { static_cast<void>(norm.value()); });
      EXPECT_NE(message.find("scale"), std::string::npos) << message;
    });
  }
}

TEST(CudaFsdp, AStepThatIsSkippedIsNotCounted) {
  for (const double offload : {0, 1}) {
    std::vector<std::vector<float>> after;
    for (const bool skips : {false, true}) {
      comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
        OneRank rank(world, skips ? std::nanf("") : 0.5f,
                     {.parameters = offload, .gradients = offload, .optimizer = offload});
        const GradNorm norm = rank.fsdp.finish_step();
        EXPECT_EQ(norm.not_finite(), skips ? "scale" : "");
        rank.optimizer.step(0.1, norm, 1);
        if (skips) {
          rank.backward(0.5f);
          rank.optimizer.step(0.1, rank.fsdp.finish_step(), 1);
        }
        EXPECT_EQ(rank.optimizer.num_steps(), 1);
        after.push_back(rank.fsdp.full_parameter(rank.model.scale));
      });
    }
    EXPECT_EQ(after[0], after[1]);
  }
}

// Elements 0, 150 and 299 of a parameter of 300 lie on the first, the middle and the last rank.
TEST(CudaFsdp, AGradientThatIsNotFiniteIsNamedWhicheverRankHoldsIt) {
  for (const std::size_t element : {0, 150, 299}) {
    comm::run_ranks(3, {}, [&](comm::ProcessGroup& world) {
      const engine::Stream compute = engine::Stream::cuda("compute", world.rank() % num_gpus());
      const engine::Memory memory(compute);
      engine::Tape tape(memory, compute);
      ToyModel model(1, 300);
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, {});
      std::vector<float> bias(300, 0.0f);
      bias[element] = std::numeric_limits<float>::infinity();
      fsdp.load(model.layers[0]->bias, bias);
      fsdp.parameters_changed();
      fsdp.begin_step();
      tape.backward(model.loss(tape, Tensor::zeros(memory, {300}, DType::kF32)));
      const GradNorm norm = fsdp.finish_step();
      EXPECT_EQ(error_of<engine::InvalidArgument>([&] { static_cast<void>(norm.value()); }),
                "[fsdp] expected finite gradients, got NaN or infinity (scale)")
          << element << " on rank " << world.rank();
    });
  }
}

TEST(CudaFsdp, ACheckNamesRankAndMicroStep) {
  for (const auto accumulate : {DType::kF32, DType::kBF16}) {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      const auto compute = engine::Stream::cuda("compute", world.rank() % num_gpus());
      const engine::Memory memory(compute);
      engine::Tape tape(memory, compute);
      ToyModel model(2, 40);
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
                {.precision = {.accumulate = accumulate}, .check_gradients = true});
      fsdp.begin_step(2);
      for (int micro = 0; micro < 2; ++micro) {
        if (micro > 0) fsdp.next_micro_step();
        std::vector<float> x(40, 0.5f);
        if (micro == 1 && world.rank() == 1) x[33] = std::nanf("");
        tape.backward(model.loss(tape, Tensor::from<float>(memory, {40}, x, "x")));
      }
      const GradNorm norm = fsdp.finish_step();
      EXPECT_EQ(norm.not_finite(), "h.0.weight, rank 1, micro-step 2");
    });
  }
}

TEST(CudaFsdp, BuffersAreThoseOfRank0InEveryStep) {
  for (const char* strategy : {"zero3", "ddp"}) {
    comm::run_ranks(3, {}, [&](comm::ProcessGroup& world) {
      const engine::Stream compute = engine::Stream::cuda("compute", world.rank() % num_gpus());
      const engine::Memory memory(compute);
      const auto rank = static_cast<float>(world.rank());
      const Tensor mean = Tensor::from<float>(memory, {2}, std::vector<float>(2, rank), "mean");
      const Tensor more = Tensor::from<float>(memory, {2}, std::vector<float>(2, rank + 1), "more");
      ToyModel model(1, 300);
      model.root.buffers = {mean};
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
                {.placement = Placement::preset(strategy)});
      constexpr int kSteps = 5;
      for (int step = 0; step < kSteps; ++step) {
        fsdp.begin_step();
        engine::launch_assign_or_add(compute, mean, more, true, "statistics");
        fsdp.cancel_step();
      }
      EXPECT_EQ(engine::to_vector<float>(mean), std::vector<float>(2, kSteps + rank)) << strategy;
    });
  }
}

TEST(CudaFsdp, NormsCoverEveryExponent) {
  for (const float x : {1e-30f, 1e-38f, 0x1p-140f, 1.0f, 3e18f, 1e-3f}) {
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      OneRank rank(world, x);
      const double exact = 2 * std::sqrt(3 + double{x} * x);  // of 2 scale x
      EXPECT_FLOAT_EQ(rank.fsdp.finish_step().value(), static_cast<float>(exact)) << x;
    });
  }
}

}  // namespace
}  // namespace tessera::shard
