// What offload must not cost: threads that launch the work of a GPU wait for nothing more than
// without it, neither for a GPU nor for what its host does, and nobody waits for ever.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/cut_values.h"
#include "tests/emulator/control.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/toy_training.h"

namespace tessera::shard {
namespace {

using engine::Stream;
using engine::Tensor;
using testing::Training;

constexpr OffloadOptions kAll{.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 2};
constexpr OffloadOptions kSome{.parameters = 0.4, .gradients = 0.7, .optimizer = 0.5};

// How often each rank's thread waited for an event or a stream in the steps between the first and
// the last.
std::map<std::string, int> waits_of_ranks(Training run) {
  run.steps = 4;
  run.num_gpus = run.ranks;
  run.before_step = [&run](comm::ProcessGroup& world, int step) {
    if (step == 1) cuda_emulation::label_thread(fmt::format("rank {}", world.rank()));
    if (step + 1 == run.steps) cuda_emulation::label_thread("end");
    return true;
  };
  cuda_emulation::start_counting();
  train(run);
  std::map<std::string, int> counts;
  for (const cuda_emulation::Wait& wait : cuda_emulation::waits()) {
    if (!wait.thread.starts_with("rank ")) continue;
    counts[wait.thread] += wait.kind != cuda_emulation::WaitKind::kStreamWaitEvent ? 1 : 0;
  }
  return counts;
}

TEST(HostWaits, OfRankThreadsAreThoseWithoutOffload) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const bool early : {false, true}) {
      Training run{.ranks = 2, .accum = 2, .numel = 70, .adamw = true};
      run.options.placement = Placement::preset(strategy);
      run.options.precision.param = engine::DType::kBF16;
      if (early) run.in_backward = UpdateGathers::kInterleaved;
      const std::map<std::string, int> expected = waits_of_ranks(run);
      EXPECT_EQ(expected.size(), 2u);
      for (const OffloadOptions& offload : {kAll, kSome}) {
        run.options.offload = offload;
        EXPECT_EQ(waits_of_ranks(run), expected)
            << strategy << (early ? ", in backward" : "") << ", offload " << offload.parameters;
      }
    }
  }
}

// Blocks whatever thread meets it until it is let go. True if that came in time.
class Gate {
 public:
  bool wait() const {
    return opened_.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  }
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_ = promise_.get_future().share();
};

struct Rank : testing::ToyRank {
  Rank(comm::ProcessGroup& world, const FsdpOptions& options)
      : ToyRank(world, options,
                {.numel = 300, .poison = false, .compute = Stream::cuda("compute", world.rank())}) {
  }

  // Two micro-steps.
  void pass() {
    for (int micro = 0; micro < 2; ++micro) {
      micro == 0 ? fsdp.begin_step(2) : fsdp.next_micro_step();
      tape.backward(model.loss(tape, Tensor::zeros(memory, {300}, engine::DType::kF32)));
    }
  }
};

// An update goes after what reads the values, a checkpoint's copy, and nobody stands by for it:
// the next step is launched as well, whose parameters come when the update is made.
void update_behind_reader(const char* strategy, bool early, const OffloadOptions& offload) {
  const std::string what =
      fmt::format("{}, early {}, offload {}", strategy, early, offload.parameters);
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    Rank rank(world, {.placement = Placement::preset(strategy),
                      .precision = {.param = engine::DType::kBF16},
                      .offload = offload});
    Sgd sgd(rank.fsdp, {.momentum = 0.9});
    // As bits: padding may be whatever it was.
    const auto add_bits = [](std::span<const float> values, std::vector<std::uint32_t>& bits) {
      for (const float x : values) bits.push_back(std::bit_cast<std::uint32_t>(x));
    };
    const auto bits_now = [&] {
      std::vector<std::uint32_t> bits;
      for (const auto& unit : rank.fsdp.units()) {
        const SplitTensor& master = unit->flats().front().master;
        for (const Tensor* part : {&master.device(), &master.host()}) {
          if (part->defined()) add_bits(engine::to_vector<float>(*part), bits);
        }
      }
      return bits;
    };
    const std::vector<std::uint32_t> before = bits_now();
    std::vector<std::uint32_t> read;
    bool in_time = false;
    Gate gate;
    const Stream reader = rank.compute.host_worker("reader");
    reader.launch({.name = "read"}, [&] {
      in_time = gate.wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (const auto& unit : rank.fsdp.units()) {
        const SplitTensor& master = unit->flats().front().master;
        if (master.has_host()) add_bits(master.host().span<float>(), read);
      }
    });
    CutValues(rank.fsdp).keep_until(reader.record("read"));
    for (int step = 0; step < 2; ++step) {
      if (early) sgd.step_in_backward(0.1);
      rank.pass();
      const GradNorm norm = rank.fsdp.finish_step();
      if (!early) sgd.step(0.1, norm, 0);
    }
    gate.open();
    rank.fsdp.synchronize();
    reader.synchronize();
    EXPECT_TRUE(in_time) << what;
    EXPECT_NE(bits_now(), before) << what;
    if (offload.parameters == 1) {
      EXPECT_EQ(read, before) << what;
    }
  });
}

TEST(HostWaits, AnUpdateAfterAReaderHoldsUpNobody) {
  for (const char* strategy : {"ddp", "zero3"}) {
    for (const bool early : {false, true}) {
      for (const OffloadOptions& offload : {OffloadOptions{}, kAll, kSome}) {
        update_behind_reader(strategy, early, offload);
      }
    }
  }
}

// A call that finds the queue of its stream full keeps the lock of CUDA's context until there is
// room, for which the GPU may have to wait for a thread that updates on the host: it must do
// without CUDA. Two ranks share the GPU, so that one stands in that call while the other launches.
TEST(HostWaits, AFullQueueIsNoneOfThoseThatUpdateOnTheHost) {
  const cuda_emulation::Settings before = cuda_emulation::settings();
  cuda_emulation::Settings small = before;
  small.queue_size = 4;
  for (const char* strategy : {"zero3", "ddp"}) {
    Training run{.ranks = 2, .accum = 2, .blocks = 4, .numel = 700, .max_norm = 0.5};
    run.options.placement = Placement::preset(strategy);
    run.options.precision.param = engine::DType::kBF16;
    run.options.offload = kAll;
    const std::vector<float> expected = train(run);
    run.num_gpus = 1;
    cuda_emulation::configure(small);
    std::future<std::vector<float>> got =
        std::async(std::launch::async, [&] { return train(run); });
    if (got.wait_for(std::chrono::minutes(2)) != std::future_status::ready) {
      fmt::print(stderr, "{}: the ranks, the GPU and its host wait for each other\n", strategy);
      std::abort();  // nobody can be joined
    }
    EXPECT_EQ(got.get(), expected) << strategy;
    cuda_emulation::configure(before);
  }
}

}  // namespace
}  // namespace tessera::shard
