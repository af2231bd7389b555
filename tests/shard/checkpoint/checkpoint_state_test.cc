// What a checkpoint holds besides plain parameters, and what it is compared with: buffers, frozen
// parameters, experts, other optimizers; and whose folder it is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/error.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/hooks/hooks.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::IoError;
using engine::Memory;
using engine::Parameter;
using engine::Tensor;
using testing::CheckpointRank;
using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::error_of;
using testing::has;
using testing::TempFolder;
using testing::ToyModel;
using testing::train_saving;
using testing::train_saving_all;

namespace fs = std::filesystem;

using Floats = std::vector<float>;
using Lines = std::vector<std::string>;
using Steps = std::vector<std::int64_t>;

CheckpointRun run_in(const std::string& folder, int steps, int ranks = 2) {
  CheckpointRun run{.training = {.ranks = ranks, .steps = steps, .blocks = 2, .adamw = true},
                    .checkpoints = {.folder = folder}};
  run.training.options.placement = Placement::preset("zero3");
  return run;
}

TEST(CheckpointState, BuffersComeBackOneForAllOrOneEach) {
  for (const bool is_one : {true, false}) {
    const TempFolder folder;
    CheckpointRun run = run_in(folder / "c", 2, 3);
    run.training.options.broadcast_buffers = is_one;
    run.prepare = [](ToyModel& model) {
      const Memory memory;
      model.layers[1]->block.buffers = {
          Tensor::from<float>(memory, {2}, Floats{1, 2}, "mean"),
          Tensor::from<std::int64_t>(memory, {}, std::vector<std::int64_t>{0}, "count"),
          Tensor::zeros(memory, {0}, DType::kF32, "none")};
    };
    run.behind_save = [&](const CheckpointRank& rank, int step) {
      // At once after the save: this is of the next step, and not saved.
      for (const Tensor& buffer : rank.fsdp.buffers()) {
        const auto value = static_cast<float>(100 * step + rank.world.rank());
        if (buffer.name() == "mean") std::ranges::fill(buffer.span<float>(), value);
        if (buffer.name() == "count") *buffer.data<std::int64_t>() = 10 * step + rank.world.rank();
      }
    };
    train_saving(run);
    run.save_every = 0;
    run.at_end = [&](const CheckpointRank& rank, int) {
      const int from = is_one ? 0 : rank.world.rank();
      const std::vector<Tensor> buffers = rank.fsdp.buffers();
      EXPECT_EQ(engine::to_vector<float>(buffers[0]), Floats(2, 100.0f + float(from)));
      EXPECT_EQ(*buffers[1].data<std::int64_t>(), 10 + from);
    };
    EXPECT_EQ(train_saving(run).first_step, 2);
    if (is_one) continue;
    run.training.ranks = 2;
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                    {"buffer mean: expected one of each of 2 ranks, got 3", "(rank 0, 1)"}));
  }
}

TEST(CheckpointState, FrozenParametersInBf16ComeBackAsTheyAre) {
  const TempFolder folder;
  for (const char* strategy : {"zero3", "ddp", "hsdp", "zero2"}) {
    CheckpointRun run = run_in(folder / strategy, 2, 4);
    run.training.options.placement = Placement::preset(strategy);
    run.training.options.precision.param = DType::kBF16;
    run.prepare = [](ToyModel& model) { model.layers[0]->weight.trainable = false; };
    const CheckpointResult first = train_saving(run);
    run.training.options.placement = Placement::preset("zero3");
    run.save_every = 0;
    EXPECT_EQ(train_saving(run).values, first.values);
    // Set free, it lacks its states.
    run.prepare = {};
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                    {"missing: optimizer.m h.0.weight", "missing: optimizer.v h.0.weight"}));
    run.load.strict = false;
    const CheckpointResult freed = train_saving(run);
    EXPECT_EQ(freed.differences.size(), 2u);
    EXPECT_EQ(freed.values.back(), 2) << "steps";
  }
}

// What trains after step `step`, besides all that always does.
void set_trainable(const std::vector<Parameter*>& parameters, int step) {
  for (Parameter* p : parameters) {
    if (p->name == "h.0.weight") p->trainable = step < 2 || step >= 4;
    if (p->name == "h.1.bias") p->trainable = step < 4;
    if (p->name == "scale") p->trainable = step >= 2;
  }
}

std::vector<Parameter*> parameters_of(ToyModel& model) {
  std::vector<Parameter*> all = model.root.parameters;
  for (const engine::Block* block : model.blocks()) {
    all.insert(all.end(), block->parameters.begin(), block->parameters.end());
  }
  return all;
}

// Saved at once after each change, while the next step runs.
TEST(CheckpointState, WhatWasFrozenOrSetFreeInMidRunGoesOnFromThere) {
  struct Case {
    const char *before, *after;
    bool is_bf16, is_early, is_offloaded;
  };
  for (const Case& c :
       {Case{"zero3", "ddp", true, false, false}, Case{"ddp", "hfsdp", false, true, false},
        Case{"hfsdp", "zero1", true, true, true}, Case{"zero1", "hybrid_zero2", false, false, true},
        Case{"hsdp", "zero2", true, false, true}, Case{"zero2", "zero3", true, true, false}}) {
    const TempFolder folder;
    CheckpointRun run = run_in(folder / "c", 6, 4);
    const auto place = [&](const char* strategy) {
      run.training.options.placement = Placement::preset(strategy);
    };
    place(c.before);
    if (c.is_bf16) run.training.options.precision.param = DType::kBF16;
    if (c.is_early) run.training.in_backward = UpdateGathers::kInterleaved;
    if (c.is_offloaded) run.training.options.offload = {.gradients = 0.5, .optimizer = 0.5};
    run.save_every = 0;
    int start = 0;
    run.prepare = [&](ToyModel& model) { set_trainable(parameters_of(model), start); };
    run.behind_step = [](const CheckpointRank& rank, int step) {
      if (step != 1 && step != 3) return true;
      set_trainable(rank.fsdp.parameters(), step + 1);
      rank.fsdp.trainable_changed();
      rank.checkpointer.save(step + 1, {});
      return true;
    };
    const CheckpointResult whole = train_saving(run);
    place(c.after);
    run.training.options.offload = {};
    run.behind_step = {};
    start = 4;
    CheckpointResult result = train_saving(run);
    EXPECT_EQ(result.first_step, 4);
    EXPECT_EQ(result.values, whole.values) << c.before << " to " << c.after;
    EXPECT_EQ(result.norms, Floats(whole.norms.begin() + 4, whole.norms.end()));
    // Through both: what was frozen is changed again.
    fs::remove_all(folder / "c/step_4");
    start = 2;
    run.behind_step = [](const CheckpointRank& rank, int step) {
      if (step != 3) return true;
      set_trainable(rank.fsdp.parameters(), 4);
      rank.fsdp.trainable_changed();
      return true;
    };
    result = train_saving(run);
    EXPECT_EQ(result.first_step, 2);
    EXPECT_EQ(result.values, whole.values) << c.before << " to " << c.after;
    // Into what was cut again after its Checkpointer was made.
    run.behind_step = {};
    run.training.steps = start = 0;
    run.resumes = false;
    run.checkpoints.folder = folder / "other";
    run.at_end = [&](const CheckpointRank& rank, int) {
      set_trainable(rank.fsdp.parameters(), 2);
      rank.fsdp.trainable_changed();
      rank.checkpointer.load(folder / "c/step_2");
    };
    const CheckpointResult loaded = train_saving(run);
    run.at_end = {};
    run.resumes = true;
    run.checkpoints.folder = folder / "c";
    start = 2;
    EXPECT_EQ(train_saving(run).values, loaded.values) << c.before << " to " << c.after;
  }
}

// They are the caller's own, who saves them, as buffers for one.
TEST(CheckpointState, IgnoredParametersAreNoPartOfIt) {
  for (const char* strategy : {"zero3", "ddp", "hfsdp", "hybrid_zero2"}) {
    const TempFolder folder, without;
    CheckpointRun run = run_in(folder / "c", 4, 4);
    float own_value = 0;
    const auto ignore = [&](CheckpointRun& r) {
      r.prepare = [&](ToyModel& model) {
        const Memory memory;
        Parameter& own = model.layers[1]->weight;
        engine::materialize({&own}, memory, /*seed=*/1);
        std::ranges::fill(own.value.span<float>(), own_value);
      };
      r.training.options.ignores = [](const Parameter& p) { return p.name == "h.1.weight"; };
    };
    ignore(run);
    own_value = 0.5f;
    run.checkpoints.folder = without / "c";
    const CheckpointResult whole = train_saving(run);
    run.checkpoints.folder = folder / "c";
    run.training.steps = 2;
    run.training.options.placement = Placement::preset(strategy);
    train_saving(run);
    run.training.steps = 4;
    run.save_every = 0;
    CheckpointResult result = train_saving(run);
    EXPECT_EQ(result.first_step, 2);
    EXPECT_EQ(result.values, whole.values) << strategy;
    own_value = 0.25f;  // nothing brings the other back
    EXPECT_NE(train_saving(run).values, whole.values);
    run.prepare = {};
    run.training.options.ignores = {};
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                    {"missing: parameter h.1.weight", "missing: optimizer.m h.1.weight"}));
  }
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 2);
  train_saving(run);
  run.training.options.ignores = [](const Parameter& p) { return p.name == "h.1.weight"; };
  run.prepare = [](ToyModel& model) {
    engine::materialize({&model.layers[1]->weight}, Memory(), /*seed=*/1);
  };
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"unexpected: parameter h.1.weight", "unexpected: optimizer.v h.1.weight"}));
}

TEST(CheckpointState, AllDifferencesAreListed) {
  const TempFolder folder;
  CheckpointRun saved = run_in(folder / "c", 2);
  train_saving(saved);
  CheckpointRun run = saved;
  run.save_every = 0;
  run.training.blocks = 3;
  run.training.numel = 299;
  EXPECT_TRUE(has(
      error_of<InvalidArgument>([&] { train_saving(run); }),
      {"parameter h.0.bias: expected shape (299), got (300)", "optimizer.v scale: expected shape",
       "missing: parameter h.2.weight", "missing: optimizer.m h.2.bias", "step_2", "(rank 0, 1)"}));
  run.load.strict = false;
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"missing: parameter h.2.weight"}));
  // Fewer layers.
  run = saved;
  run.save_every = 0;
  run.training.blocks = 1;
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { train_saving(run); }),
          {"unexpected: parameter h.1.weight", "unexpected: optimizer.m h.1.bias", "step_2"}));
  run.load.strict = false;
  EXPECT_EQ(train_saving(run).differences.size(), 6u);
  // Another optimizer, whose states start again, and its count of steps.
  run = saved;
  run.save_every = 0;
  run.training.adamw = false;
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"missing: optimizer.velocity scale", "unexpected: optimizer.v scale",
                   "unexpected: parameter group"}));
  run.load.strict = false;
  const CheckpointResult result = train_saving(run);
  EXPECT_EQ(result.first_step, 2);
  EXPECT_EQ(result.values.back(), 0);
  run.load.groups = false;
  EXPECT_LT(train_saving(run).differences.size(), result.differences.size());
}

// Of a model with one matrix, h.1.weight.
CheckpointRun compressing(const std::string& folder, const HookOptions& hook) {
  CheckpointRun run = run_in(folder, 3);
  run.training.options.reducer = make_hook(hook);
  run.training.options.reducer_text = describe(hook);
  run.prepare = [](ToyModel& model) { model.layers[1]->weight.shape = {20, 15}; };
  return run;
}

HookOptions compresses_all(const char* name) {
  HookOptions hook;
  set_hook(hook, name);
  hook.powersgd.start_step = 1;
  hook.powersgd.low_rank.min_compression_rate = 0;
  return hook;
}

TEST(CheckpointState, WhatAHookOwesIsNotDroppedInSilence) {
  const TempFolder folder;
  const auto run_of = [&](const char* name, bool owes) {
    HookOptions hook = compresses_all("powersgd");
    hook.powersgd.error_feedback = owes;
    return compressing(folder / name, hook);
  };
  const CheckpointResult owing = train_saving(run_of("owing", true));
  train_saving(run_of("free", false));
  CheckpointRun run = run_of("owing", false);
  run.save_every = 0;
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"unexpected: powersgd.error h.1.weight", "step_3"}));
  run.load.strict = false;
  const CheckpointResult freed = train_saving(run);
  EXPECT_EQ(freed.differences, Lines{"unexpected: powersgd.error h.1.weight"});
  EXPECT_EQ(freed.values, owing.values);
  run = run_of("free", true);
  run.save_every = 0;
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"expected the error of a parameter that is compressed, got none",
                   "min_compression_rate was another (h.1.weight)"}));
  run = run_of("free", false);
  run.save_every = 0;
  EXPECT_EQ(train_saving(run).first_step, 3);
}

TEST(CheckpointState, WhatAnotherHookOwesIsNotDroppedInSilence) {
  const TempFolder folder;
  const HookOptions all = compresses_all("powersgd"), batched = compresses_all("batched_powersgd");
  HookOptions nothing = all;
  nothing.powersgd.low_rank.min_compression_rate = 1e9;
  train_saving(compressing(folder / "all", all));
  train_saving(compressing(folder / "batched", batched));
  const auto differences = [&](const char* saved, const HookOptions& hook) {
    CheckpointRun run = compressing(folder / saved, hook);
    run.save_every = 0;
    const std::string refused = error_of<InvalidArgument>([&] { train_saving(run); });
    run.load.strict = false;
    const Lines found = train_saving(run).differences;
    for (const std::string& line : found) EXPECT_TRUE(has(refused, {line})) << line;
    return found;
  };
  EXPECT_EQ(differences("all", nothing),
            (Lines{"unexpected: powersgd.error h.1.weight", "unexpected: powersgd.q h.1.weight"}));
  const Lines of_units = differences("batched", all);
  EXPECT_EQ(std::ranges::count(of_units, "unexpected: powersgd.error h.1.bias"), 1);
  EXPECT_EQ(std::ranges::count(of_units, "unexpected: powersgd.error h.1.weight"), 0);
  EXPECT_EQ(std::ranges::count(of_units, "unexpected: powersgd.q h.1"), 1);
  CheckpointRun run = compressing(folder / "all", batched);
  run.save_every = 0;
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"unexpected: powersgd.q h.1.weight"}));
}

// Nothing is written before all is compared.
TEST(CheckpointState, WhatDoesNotFitChangesNothing) {
  const TempFolder folder;
  train_saving(run_in(folder / "c", 2));
  CheckpointRun run = run_in(folder / "c", 0);
  run.resumes = false;
  run.checkpoints.folder = folder / "other";
  run.training.adamw = false;
  run.at_end = [&](const CheckpointRank& rank, int) {
    const Parameter& p = *rank.fsdp.parameters().front();
    const Floats before = rank.fsdp.full_parameter(p);
    EXPECT_THROW(rank.checkpointer.load(folder / "c/step_2"), InvalidArgument);
    EXPECT_EQ(rank.fsdp.full_parameter(p), before);
    EXPECT_EQ(rank.optimizer.num_steps(), 0);
  };
  train_saving(run);
}

// A block on every rank, and experts in groups of their own, each with another value.
struct WithExperts {
  WithExperts(ProcessGroup& world, int group, const std::vector<std::string>& names, float value)
      : dense{"dense", {&weight}}, own(world.split(group, world.rank())) {
    for (const std::string& name : names) {
      experts.emplace_back(new Parameter{.name = name, .shape = {130}});
    }
    for (const auto& p : experts) block.parameters.push_back(p.get());
    const FsdpOptions options{.placement = Placement::preset("zero3")};
    dense_fsdp =
        std::make_unique<Fsdp>(world, memory, compute, std::vector{&dense}, nullptr, options);
    expert_fsdp =
        std::make_unique<Fsdp>(*own, memory, compute, std::vector{&block}, nullptr, options);
    for (const auto& p : experts) expert_fsdp->load(*p, Floats(130, value));
    expert_fsdp->parameters_changed();
  }
  std::vector<CheckpointPart> parts() { return {{dense_fsdp.get()}, {expert_fsdp.get()}}; }

  engine::Stream compute = engine::Stream::inline_cpu("compute");
  Memory memory;
  Parameter weight{.name = "dense", .shape = {300}, .init = engine::Init::normal(1)};
  engine::Block dense, block{"experts", {}};
  std::vector<std::unique_ptr<Parameter>> experts;
  std::unique_ptr<ProcessGroup> own;
  std::unique_ptr<Fsdp> dense_fsdp, expert_fsdp;
};

TEST(CheckpointState, ExpertsOfTheirOwnGroupsAndCopiesOfThem) {
  const TempFolder folder;
  const auto save = [&](const char* name, ProcessGroup& world, WithExperts& model) {
    Checkpointer checkpointer(world, model.parts(), {.folder = folder / name});
    checkpointer.save(1, {});
    checkpointer.wait();
  };
  // Each rank one of its own.
  comm::run_ranks(3, {}, [&](ProcessGroup& world) {
    const int rank = world.rank();
    WithExperts model(world, rank, {"expert." + std::to_string(rank)}, float(rank + 1));
    save("own", world, model);
  });
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    WithExperts model(world, 0, {"expert.0", "expert.1", "expert.2"}, 0);
    Checkpointer checkpointer(world, model.parts(), {.folder = folder / "own"});
    EXPECT_EQ(checkpointer.load_newest()->step, 1);
    for (std::size_t e = 0; e < 3; ++e) {
      EXPECT_EQ(model.expert_fsdp->full_parameter(*model.experts[e]), Floats(130, float(e + 1)));
    }
  });
  // Two groups of two ranks that have the same.
  comm::run_ranks(4, {}, [&](ProcessGroup& world) {
    WithExperts model(world, world.rank() / 2, {"expert"}, 7);
    save("copies", world, model);
  });
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    WithExperts model(world, world.rank(), {"expert"}, 0);
    Checkpointer checkpointer(world, model.parts(), {.folder = folder / "copies"});
    EXPECT_EQ(checkpointer.load_newest()->step, 1);
    EXPECT_EQ(model.expert_fsdp->full_parameter(*model.experts[0]), Floats(130, 7));
  });
  // Which are not the same after all.
  comm::run_ranks(4, {}, [&](ProcessGroup& world) {
    const int copy = world.rank() / 2;
    WithExperts model(world, copy, {"expert"}, float(copy));
    EXPECT_TRUE(has(error_of<IoError>([&] { save("differ", world, model); }),
                    {"expected copies of the same values", "parameter expert", "(rank 0)"}));
  });
  EXPECT_EQ(steps_in(folder / "differ"), Steps{});
}

TEST(CheckpointState, TheSameBytesAreWrittenAgain) {
  for (const int steps : {0, 2}) {  // 0: at once after the start
    const TempFolder folder;
    const auto save_at_end = [steps](const CheckpointRank& rank, int) {
      rank.checkpointer.save(steps, {{"a", "b"}});
      rank.checkpointer.wait();
    };
    CheckpointRun run = run_in(folder / "a", steps);
    run.save_every = 0;
    run.at_end = save_at_end;
    const CheckpointResult first = train_saving(run);
    const std::string name = "step_" + std::to_string(steps);
    run.checkpoints.folder = folder / "b";
    run.from = folder / ("a/" + name);
    run.checkpoints.async = false;
    EXPECT_EQ(train_saving(run).values, first.values);
    int num_files = 0;
    for (const auto& entry : fs::directory_iterator(folder / ("a/" + name))) {
      const std::string file = name + "/" + entry.path().filename().string();
      EXPECT_EQ(folder.read("a/" + file), folder.read("b/" + file)) << file;
      ++num_files;
    }
    EXPECT_EQ(num_files, 5);
  }
}

TEST(CheckpointState, FoldersAreNotMixed) {
  const TempFolder folder;
  train_saving(run_in(folder / "a", 3));
  CheckpointRun run = run_in(folder / "a", 4);
  run.resumes = false;  // a new run
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"expected a folder without checkpoints", "step 3"}));
  run = run_in(folder / "a", 4);
  run.from = folder / "a/step_2";
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { train_saving(run); }),
                  {"what follows", "step_2, got one that has step 3", "name another"}));
  train_saving(run_in(folder / "b", 1));
  run.from = folder / "b/step_1";  // of another run
  EXPECT_THROW(train_saving(run), InvalidArgument);
  run.checkpoints.folder = folder / "new";
  EXPECT_EQ(train_saving(run).first_step, 1);
  // Who neither loads nor asks.
  run = run_in(folder / "a", 0);
  run.at_end = [](const CheckpointRank& rank, int) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.checkpointer.save(2, {}); }),
                    {"expected a step after those in the folder, got 2 where there is 3"}));
    EXPECT_THROW(rank.checkpointer.save(-1, {}), InvalidArgument);
    rank.fsdp.begin_step();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.checkpointer.save(9, {}); }),
                    {"[checkpoint] expected finish_step() or cancel_step()", "(rank 0, 1)"}));
    EXPECT_THROW(rank.checkpointer.load_newest(), InvalidArgument);
    rank.fsdp.cancel_step();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      rank.checkpointer.save(9, {{"a", "\xff"}});
                    }),
                    {"expected values in UTF-8", "\\xff"}));
  };
  train_saving(run);
  // Two at a time.
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    WithExperts model(world, 0, {"e"}, 0);
    const Checkpointer first(world, model.parts(), {.folder = folder / "x"});
    EXPECT_TRUE(has(
        error_of<IoError>([&] { Checkpointer(world, model.parts(), {.folder = folder / "x"}); }),
        {"expected one run at a time", "(rank 0)"}));
    EXPECT_THROW(Checkpointer(world, {}, {.folder = folder / "y"}), InvalidArgument);
  });
}

}  // namespace
}  // namespace tessera::shard
