// Buffers of blocks: tensors that forward writes and no optimizer updates.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/fsdp.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using testing::affine;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::LoggedGroup;
using testing::ToyModel;

constexpr std::int64_t kNumel = 10;
using Floats = std::vector<float>;
using Lines = std::vector<std::string>;

// Two layers and a root. The second layer counts its forward passes and keeps a mean, which start
// as the rank says; the root has one number.
struct Model : ToyModel {
  Model(const Memory& memory, int rank) : ToyModel(2, kNumel) {
    const auto start = static_cast<float>(100 * (rank + 1));
    layers[1]->block.buffers = {
        Tensor::from<float>(memory, {2}, Floats{start, -start}, "mean"),
        Tensor::from<std::int64_t>(memory, {}, std::vector<std::int64_t>{rank}, "count")};
    root.buffers = {Tensor::from<float>(memory, {1}, Floats{start}, "scale_max")};
  }

  Tensor& mean() { return layers[1]->block.buffers[0]; }
  Tensor& count() { return layers[1]->block.buffers[1]; }

  // As the loss of ToyModel, and after it the work of `stream` that adds to the buffers.
  void pass(Tape& tape, const Memory& memory, int rank) {
    tape.backward(loss(tape, Tensor::zeros(memory, {kNumel}, DType::kF32)));
    tape.stream().launch({.name = "statistics"}, [mean = mean(), count = count(), rank] {
      mean.data<float>()[0] += static_cast<float>(rank + 1);
      ++*count.data<std::int64_t>();
    });
  }
};

// What a rank's buffers hold.
Floats values_of(Model& model, const Stream& compute) {
  compute.synchronize();
  Floats values = engine::to_vector<float>(model.mean());
  values.push_back(static_cast<float>(*model.count().data<std::int64_t>()));
  values.push_back(model.root.buffers[0].item());
  return values;
}

FsdpOptions options_of(const char* strategy, bool broadcast_buffers = true) {
  return {.placement = Placement::preset(strategy), .broadcast_buffers = broadcast_buffers};
}

TEST(Buffers, AreThoseOfRank0FromTheStartAndInEveryStep) {
  for (const char* strategy : {"ddp", "zero1", "zero3", "hfsdp"}) {
    for (const bool is_async : {false, true}) {
      comm::run_ranks(3, {}, [&](ProcessGroup& world) {
        const int rank = world.rank();
        const auto seed = 1 + static_cast<std::uint64_t>(rank);
        const Stream compute = is_async ? Stream::worker_cpu("compute", {.delay_seed = seed})
                                        : Stream::inline_cpu("compute");
        const Memory memory(compute);
        Tape tape(memory, compute);
        Model model(memory, rank);
        FsdpOptions options = options_of(strategy);
        options.delay_seed = is_async ? 10 + seed : 0;
        Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
        EXPECT_EQ(values_of(model, compute), (Floats{100, -100, 0, 100})) << strategy;
        for (const float step : {0.0f, 1.0f, 2.0f}) {
          fsdp.begin_step(2);
          EXPECT_EQ(values_of(model, compute), (Floats{100 + 2 * step, -100, 2 * step, 100}))
              << strategy << " rank " << rank;
          model.pass(tape, memory, rank);
          fsdp.next_micro_step();
          model.pass(tape, memory, rank);
          fsdp.finish_step();
          EXPECT_EQ(values_of(model, compute),
                    (Floats{100 + 2 * step + 2 * float(rank + 1), -100, 2 * step + 2, 100}))
              << strategy << ": between steps each rank has its own";
        }
        fsdp.broadcast(fsdp.buffers(), 1);
        EXPECT_EQ(values_of(model, compute), (Floats{108, -100, 6, 100}));
      });
    }
  }
}

TEST(Buffers, AreSentInDeclaredOrderBeforeAnythingElse) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const Stream compute = Stream::inline_cpu("compute");
    const Memory memory(compute);
    for (const auto& [unit_min_numel, strategy] : {std::pair{0, "zero3"}, {1000, "ddp"}}) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      Tape tape(memory, compute);
      Model model(memory, world.rank());
      // Blocks without parameters have their turn as well.
      engine::Block first{.name = "first", .buffers = {model.mean()}};
      std::vector<engine::Block*> blocks = model.blocks();
      blocks.insert(blocks.begin(), &first);
      model.layers[0]->block.buffers = {Tensor::zeros(memory, {0}, DType::kF32, "empty")};
      FsdpOptions options = options_of(strategy);
      options.unit_min_numel = unit_min_numel;
      Fsdp fsdp(group, memory, compute, blocks, &model.root, options);
      const Lines sent = {"broadcast mean", "broadcast empty", "broadcast mean", "broadcast count",
                          "broadcast scale_max"};
      for (int step = 0; step < 2; ++step) {
        log.take();
        fsdp.begin_step(2);
        EXPECT_EQ(log.take(), sent) << strategy;
        model.pass(tape, memory, world.rank());
        fsdp.next_micro_step();
        model.pass(tape, memory, world.rank());
        fsdp.finish_step();
        for (const std::string& line : log.take()) {
          EXPECT_FALSE(line.starts_with("broadcast")) << line;
        }
      }
    }
  });
}

TEST(Buffers, StayTheRanksOwnWhereThatIsWanted) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const Stream compute = Stream::inline_cpu("compute");
    const Memory memory(compute);
    CollectiveLog log;
    LoggedGroup group(world, log);
    Model model(memory, world.rank());
    // Those of other shapes are nobody else's business then.
    if (world.rank() == 1) model.root.buffers.push_back(Tensor::zeros(memory, {7}, DType::kF32));
    Fsdp fsdp(group, memory, compute, model.blocks(), &model.root, options_of("ddp", false));
    log.take();
    fsdp.begin_step();
    EXPECT_EQ(log.take(), Lines{});
    const auto start = static_cast<float>(100 * (world.rank() + 1));
    EXPECT_EQ(values_of(model, compute), (Floats{start, -start, float(world.rank()), start}));
  });
}

// Rank 0 has seen its last batch in the first step, rank 1 in the second.
TEST(Buffers, AreThoseOfTheFirstRankThatHasABatch) {
  comm::run_ranks(3, {}, [](ProcessGroup& world) {
    const int rank = world.rank();
    const Stream compute = Stream::inline_cpu("compute");
    const Memory memory(compute);
    Tape tape(memory, compute);
    Model model(memory, rank);
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options_of("ddp"));
    int step = 0;
    const std::vector<Floats> expected = {
        {100, -100, 0, 100}, {102, -100, 1, 100}, {105, -100, 2, 100}};
    while (const int micro_steps = fsdp.join(step <= rank ? 1 : 0)) {
      ASSERT_LT(step, 3);
      fsdp.begin_step(micro_steps);
      EXPECT_EQ(values_of(model, compute), expected[static_cast<std::size_t>(step)]) << step;
      if (step <= rank) model.pass(tape, memory, rank);
      fsdp.finish_step();
      ++step;
    }
    EXPECT_EQ(step, 3);
    EXPECT_EQ(values_of(model, compute), (Floats{108, -100, 3, 100})) << "at the end";
  });
}

// Nothing but events orders the broadcasts and the work that reads and writes buffers: the host
// waits for none of it and runs far ahead.
TEST(Buffers, AreSentAfterWhatWritesThemAndBeforeWhatReadsThem) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const auto seed = 1 + static_cast<std::uint64_t>(world.rank());
    const Stream compute = Stream::worker_cpu("compute", {.delay_seed = seed});
    const Memory memory(compute);
    Model model(memory, world.rank());
    FsdpOptions options = options_of("ddp");
    options.delay_seed = 10 + seed;
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
    constexpr int kSteps = 20;
    Floats seen, expected;
    for (int step = 0; step < kSteps; ++step) {
      fsdp.begin_step();
      compute.launch({.name = "statistics"}, [mean = model.mean(), &seen, rank = world.rank()] {
        seen.push_back(mean.data<float>()[0]);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        mean.data<float>()[0] += static_cast<float>(1 + rank);
      });
      fsdp.cancel_step();
      expected.push_back(static_cast<float>(100 + step));
    }
    compute.synchronize();
    EXPECT_EQ(seen, expected) << "rank " << world.rank();
  });
}

// What is put in place of a buffer is sent from then on.
TEST(Buffers, AreLookedUpInEachStep) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const Stream compute = Stream::inline_cpu("compute");
    const Memory memory(compute);
    Model model(memory, world.rank());
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options_of("zero3"));
    const auto own = static_cast<float>(world.rank() + 1);
    model.mean() = Tensor::from<float>(memory, {2}, Floats{own, own}, "mean");
    fsdp.begin_step();
    EXPECT_EQ(values_of(model, compute), (Floats{1, 1, 0, 100}));
  });
}

TEST(Buffers, ThatDifferBetweenRanksAreNamedBeforeAnythingIsSent) {
  struct Case {
    std::function<void(Model&, const Memory&, FsdpOptions&)> spoil;
    std::string expected;  // of rank 1's line of the plan
  };
  const std::vector<Case> cases = {
      {[](Model& m, const Memory& memory, FsdpOptions&) {
         m.mean() = Tensor::zeros(memory, {3}, DType::kF32, "mean");
       },
       "rank 0 '  buffer mean of h.1: (2) f32', rank 1 '  buffer mean of h.1: (3) f32'"},
      {[](Model& m, const Memory& memory, FsdpOptions&) {
         m.mean() = Tensor::zeros(memory, {2}, DType::kBF16, "mean");
       },
       "rank 1 '  buffer mean of h.1: (2) bf16'"},
      {[](Model& m, const Memory& memory, FsdpOptions&) {
         m.mean() = Tensor::zeros(memory, {2}, DType::kF32, "median");
       },
       "rank 1 '  buffer median of h.1: (2) f32'"},
      {[](Model& m, const Memory&, FsdpOptions&) { std::swap(m.mean(), m.count()); },
       "rank 1 '  buffer count of h.1: () i64'"},
      {[](Model& m, const Memory&, FsdpOptions&) { m.root.buffers.clear(); },
       "rank 0 '  buffer scale_max of root: (1) f32', rank 1 '(no such line)'"},
      {[](Model&, const Memory&, FsdpOptions& o) { o.broadcast_buffers = false; },
       "rank 1 'broadcast_buffers false'"},
  };
  for (const Case& c : cases) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
                        const Memory memory;
                        Model model(memory, world.rank());
                        FsdpOptions options;
                        if (world.rank() == 1) c.spoil(model, memory, options);
                        const Fsdp fsdp(world, memory, Stream::inline_cpu("compute"),
                                        model.blocks(), &model.root, options);
                      });
                    }),
                    {"[plan]", c.expected}));
  }
}

TEST(Buffers, ThatComeToDifferLaterAreNamedByEveryRank) {
  const std::string error = error_of<engine::CommError>([] {
    comm::run_ranks(2, {}, [](ProcessGroup& world) {
      const Memory memory;
      const Stream compute = Stream::inline_cpu("compute");
      Model model(memory, world.rank());
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options_of("ddp"));
      if (world.rank() == 1) model.mean() = Tensor::zeros(memory, {3}, DType::kF32, "mean");
      fsdp.begin_step();
      fsdp.synchronize();
    });
  });
  EXPECT_TRUE(has(error, {"broadcast", "mean", "rank 1"}));
}

TEST(Buffers, WithoutMemoryAreRefused) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    const Memory memory;
    Model model(memory, 0);
    model.root.buffers.emplace_back();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      const Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(),
                                      &model.root, {});
                    }),
                    {"buffer", "undefined", "root"}));
  });
}

}  // namespace
}  // namespace tessera::shard
