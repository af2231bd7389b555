// Saves while training goes on: what is saved is what was there at the call, whatever follows.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/stream.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/cut_values.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/faults.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using engine::Parameter;
using testing::CheckpointRank;
using testing::CheckpointRun;
using testing::FaultHere;
using testing::goes_on_unharmed;
using testing::TempFolder;
using testing::train_saving;

namespace fs = std::filesystem;

using Floats = std::vector<float>;
using Steps = std::vector<std::int64_t>;

CheckpointRun run_in(const TempFolder& folder, int steps) {
  CheckpointRun run{.training = {.steps = steps, .blocks = 2, .adamw = true},
                    .checkpoints = {.folder = folder / "c"}};
  run.training.options.placement = Placement::preset("zero3");
  return run;
}

// Rank 0's first flush waits until the file is removed.
struct Hold {
  explicit Hold(const TempFolder& folder)
      : path(folder / "hold"), fault({"fsync", "model-00000-of", 1, path}) {}
  ~Hold() { release(); }

  void wait() const {
    while (!fs::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void release() const { fs::remove(path); }

  std::string path;
  FaultHere fault;
};

TEST(CheckpointAsync, TrainingGoesOnWhileTheDiskIsBusy) {
  const TempFolder folder, without;
  CheckpointRun run = run_in(folder, 9);
  run.save_every = 4;
  const Hold hold(folder);
  std::atomic<int> num_saving = 0;
  run.behind_step = [&](const CheckpointRank& rank, int step) {
    if (step >= 3 && step < 7) num_saving += rank.checkpointer.is_saving() ? 1 : 0;
    if (step == 3 && rank.world.rank() == 0) hold.wait();
    if (step == 6 && rank.world.rank() == 0) {
      EXPECT_EQ(steps_in(folder / "c"), Steps{});
      hold.release();
    }
    return true;
  };
  train_saving(run);
  EXPECT_EQ(num_saving, 8);  // on 2 ranks, in 4 steps
  EXPECT_EQ(steps_in(folder / "c"), (Steps{8, 4}));
  fs::remove_all(folder / "c/step_8");
  EXPECT_TRUE(goes_on_unharmed(run, 4, without / "c"));
}

// The largest nice value among the threads of this process.
int nicest_thread() {
  int nicest = -20;
  for (const auto& entry : fs::directory_iterator("/proc/self/task")) {
    const int id = std::stoi(entry.path().filename().string());
    errno = 0;
    const int nice = ::getpriority(PRIO_PROCESS, static_cast<id_t>(id));
    if (errno == 0) nicest = std::max(nicest, nice);  // else it has ended
  }
  return nicest;
}

// With nice 19 a save waits for all else that a busy machine does, and then so does every rank.
TEST(CheckpointAsync, WhoWritesGivesWayToRanksAndIsNotStarved) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder, 2);
  run.save_every = 1;
  const Hold hold(folder);
  run.behind_step = [&](const CheckpointRank& rank, int step) {
    if (step > 0 || rank.world.rank() != 0) return true;
    hold.wait();
    EXPECT_EQ(nicest_thread(), std::min(::getpriority(PRIO_PROCESS, 0) + 5, 19));
    hold.release();
    return true;
  };
  train_saving(run);
  EXPECT_EQ(steps_in(folder / "c"), (Steps{2, 1}));
}

TEST(CheckpointAsync, WhatIsWrittenRightAfterTheCallIsNotSaved) {
  const TempFolder folder, without;
  CheckpointRun run = run_in(folder, 1);
  run.training.numel = testing::kIsSlow ? 1 << 15 : 1 << 19;  // takes a while to copy
  run.behind_save = [](const CheckpointRank& rank, int) {
    const std::vector<Parameter*> all = rank.fsdp.parameters();
    for (auto p = all.rbegin(); p != all.rend(); ++p) {
      const Floats other(static_cast<std::size_t>((*p)->shape.numel()), 7);
      rank.optimizer.load_state(**p, "v", other);
      rank.fsdp.load(**p, other);
    }
    rank.optimizer.set_num_steps(77);
    rank.fsdp.parameters_changed();
  };
  train_saving(run);
  EXPECT_TRUE(goes_on_unharmed(run, 1, without / "c"));
}

TEST(CheckpointAsync, TheNextSaveAndALoadComeAfterTheOneAtWork) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder, 1);
  const Hold hold(folder);
  run.behind_save = [&](const CheckpointRank& rank, int step) {
    std::jthread releases;
    if (rank.world.rank() == 0) {
      releases = std::jthread([&] {
        hold.wait();
        EXPECT_EQ(steps_in(folder / "c"), Steps{});
        hold.release();
      });
    }
    EXPECT_EQ(rank.checkpointer.poll(), std::nullopt);
    rank.checkpointer.save(step + 1, {});
    EXPECT_EQ(rank.checkpointer.load_newest()->step, step + 1);
    EXPECT_FALSE(rank.checkpointer.is_saving());
    rank.checkpointer.save(step + 2, {});
    EXPECT_EQ(rank.checkpointer.wait(), step + 2);
    EXPECT_EQ(rank.checkpointer.wait(), std::nullopt);
  };
  train_saving(run);
  EXPECT_EQ(steps_in(folder / "c"), (Steps{3, 2, 1}));
}

TEST(CheckpointAsync, WhoEndsInASaveLeavesNoCheckpointOfIt) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder, 1);
  train_saving(run);
  run.training.steps = 2;
  run.behind_save = [](const CheckpointRank&, int) { throw std::runtime_error("a bug"); };
  EXPECT_THROW(train_saving(run), std::runtime_error);
  EXPECT_EQ(steps_in(folder / "c"), Steps{1});
  run.behind_save = {};
  EXPECT_EQ(train_saving(run).first_step, 1);
  EXPECT_EQ(steps_in(folder / "c"), (Steps{2, 1}));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "c"), {}), 4) << "no leftovers";
}

// Everything that writes values waits for who reads them.
TEST(CheckpointAsync, NobodyWritesWhatIsBeingCopied) {
  using Use = std::function<void(const CheckpointRank&, const std::function<void()>& train)>;
  const std::vector<std::pair<const char*, Use>> uses = {
      {"step",
       [](const CheckpointRank& rank, const std::function<void()>& train) {
         train();
         rank.optimizer.step(1e-3, rank.fsdp.finish_step(), 0);
       }},
      {"load",
       [](const CheckpointRank& rank, const std::function<void()>&) {
         const Parameter& p = *rank.fsdp.parameters().front();
         rank.fsdp.load(p, Floats(static_cast<std::size_t>(p.shape.numel())));
       }},
      {"load_state",
       [](const CheckpointRank& rank, const std::function<void()>&) {
         const Parameter& p = *rank.fsdp.parameters().front();
         rank.optimizer.load_state(p, "m", Floats(static_cast<std::size_t>(p.shape.numel())));
       }},
      {"trainable_changed",
       [](const CheckpointRank& rank, const std::function<void()>&) {
         rank.fsdp.parameters().front()->trainable = false;
         rank.fsdp.trainable_changed();
       }},
      {"step_in_backward", [](const CheckpointRank& rank, const std::function<void()>& train) {
         train();
         rank.fsdp.finish_step();
       }}};
  for (const auto& [name, use] : uses) {
    for (const double offload : {0.0, 1.0}) {
      comm::run_ranks(1, {}, [&, name = name, &use = use](comm::ProcessGroup& world) {
        const engine::Stream compute = engine::Stream::inline_cpu("compute");
        const engine::Memory memory(compute);
        engine::Tape tape(memory, compute);
        testing::ToyModel model(2, 300);
        Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
                  {.placement = Placement::preset("zero3"),
                   .offload = {.parameters = offload, .gradients = offload, .optimizer = offload}});
        AdamW optimizer(fsdp, {});
        const TempFolder folder;
        Checkpointer checkpointer(world, {{&fsdp, &optimizer}}, {.folder = folder / "c"});
        if (std::string(name) == "step_in_backward") optimizer.step_in_backward(1e-3);
        const engine::Stream reader = engine::Stream::worker_cpu("reader");
        std::promise<void> may_end;
        std::atomic<bool> has_read = false;
        reader.launch({.name = "read"}, [&, end = may_end.get_future().share()] {
          end.wait();
          has_read = true;
        });
        CutValues(fsdp).keep_until(reader.record("read"));
        const engine::Stream other = engine::Stream::worker_cpu("other reader");
        CutValues(fsdp).keep_until(other.record("read"));  // which has read before
        const std::jthread ends([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          may_end.set_value();
        });
        use({world, fsdp, optimizer, checkpointer}, [&] {
          fsdp.begin_step();
          tape.backward(
              model.loss(tape, engine::Tensor::zeros(memory, {300}, engine::DType::kF32)));
        });
        EXPECT_TRUE(has_read) << name << " offload " << offload;
      });
    }
  }
}

}  // namespace
}  // namespace tessera::shard
