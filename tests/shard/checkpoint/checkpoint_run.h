// Training of the toy model that saves checkpoints and goes on from them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/checkpointer.h"
#include "tests/shard/toy_training.h"

namespace tessera::testing {

/// One rank of a run.
struct CheckpointRank {
  comm::ProcessGroup& world;
  shard::Fsdp& fsdp;
  shard::Optimizer& optimizer;
  shard::Checkpointer& checkpointer;
};

struct CheckpointRun {
  Training training = {};  ///< `steps`: the last one
  shard::CheckpointerOptions checkpoints = {};
  int save_every = 1;     ///< 0: never
  bool resumes = true;    ///< from the newest there is
  std::string from = {};  ///< resumes from this one
  shard::LoadOptions load = {};
  /// What every rank does after each step; false: it ends there.
  std::function<bool(const CheckpointRank&, int step)> behind_step = {};
  std::function<void(ToyModel&)> prepare = {};  ///< before the model is wrapped
  /// What every rank does at once after save(), and after the last step.
  std::function<void(const CheckpointRank&, int step)> behind_save = {}, at_end = {};
  bool goes_on = false;  ///< after saves that fail
};

struct CheckpointResult {
  std::vector<float> values;  ///< of all parameters and states of the optimizer, on rank 0
  std::vector<float> norms;   ///< of the steps that were made
  int first_step = 0;
  std::int64_t copy_nbytes = 0;
  std::map<std::string, std::string> saved_values;
  std::vector<std::string> warnings, differences;
  std::vector<std::string> errors;  ///< of saves, with `goes_on`
};

/// One rank's part.
inline CheckpointResult train_saving_rank(comm::ProcessGroup& world, const CheckpointRun& run) {
  const Training& t = run.training;
  CheckpointResult result;
  const engine::Stream compute = t.compute(world.rank());
  const engine::Memory memory(compute, {.cache = t.cache, .poison = t.poison});
  engine::Tape tape(memory, compute);
  ToyModel model(t.blocks, t.numel);
  if (run.prepare) run.prepare(model);
  shard::FsdpOptions options = t.options;
  options.delay_seed = t.delay_seed;
  shard::Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
  std::unique_ptr<shard::Optimizer> optimizer;
  if (t.adamw) {
    optimizer = std::make_unique<shard::AdamW>(fsdp, shard::AdamWOptions{});
  } else {
    optimizer = std::make_unique<shard::Sgd>(fsdp, shard::SgdOptions{.momentum = 0.9});
  }
  shard::CheckpointerOptions checkpoints = run.checkpoints;
  checkpoints.warn = [&](std::string_view text) { result.warnings.emplace_back(text); };
  shard::Checkpointer checkpointer(world, {{&fsdp, optimizer.get()}}, checkpoints);
  const CheckpointRank rank{world, fsdp, *optimizer, checkpointer};
  const auto attempt = [&](const std::function<void()>& fn) {
    try {
      fn();
    } catch (const engine::IoError& e) {
      if (!run.goes_on) throw;
      result.errors.emplace_back(e.what());
    }
  };
  int step = 0;
  std::optional<shard::LoadedCheckpoint> loaded;
  if (!run.from.empty()) {
    loaded = checkpointer.load(run.from, run.load);
  } else if (run.resumes) {
    loaded = checkpointer.load_newest(run.load);
  } else {
    checkpointer.check_is_new();
  }
  if (loaded) {
    step = static_cast<int>(loaded->step);
    result.saved_values = loaded->values;
    result.differences = loaded->differences;
  }
  result.first_step = step;
  std::vector<shard::GradNorm> norms;
  for (; step < t.steps; ++step) {
    if (t.in_backward) optimizer->step_in_backward(1e-3, *t.in_backward);
    for (int micro = 0; micro < t.accum; ++micro) {
      if (micro == 0) {
        fsdp.begin_step(t.accum);
      } else {
        fsdp.next_micro_step();
      }
      const int number = (step * t.accum + micro) * world.size() + world.rank();
      const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
      std::vector<float> values(static_cast<std::size_t>(t.numel));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
      const auto x = engine::Tensor::from<float>(memory, {t.numel}, values, "x");
      tape.backward(model.loss(tape, x, t.recompute, t.rounds));
    }
    norms.push_back(fsdp.finish_step());
    if (!t.in_backward) optimizer->step(1e-3, norms.back(), t.max_norm);
    if (run.save_every > 0 && (step + 1) % run.save_every == 0) {
      attempt([&] { checkpointer.save(step + 1, {{"position", std::to_string(step + 1)}}); });
      if (run.behind_save) run.behind_save(rank, step + 1);
    }
    attempt([&] { checkpointer.poll(); });
    if (run.behind_step && !run.behind_step(rank, step)) break;
  }
  attempt([&] { checkpointer.wait(); });
  if (run.at_end) run.at_end(rank, step);
  for (const shard::GradNorm& norm : norms) result.norms.push_back(norm.value());
  const auto add = [&](const std::vector<float>& values) {
    result.values.insert(result.values.end(), values.begin(), values.end());
  };
  for (const engine::Parameter* p : fsdp.parameters()) {
    add(fsdp.full_parameter(*p));
    if (!p->trainable) continue;
    for (const std::string& name : optimizer->state_names()) add(optimizer->full_state(*p, name));
  }
  add({static_cast<float>(optimizer->num_steps())});
  result.copy_nbytes = checkpointer.copy_nbytes();
  return result;
}

/// What each rank has.
inline std::vector<CheckpointResult> train_saving_all(const CheckpointRun& run) {
  std::vector<CheckpointResult> results(static_cast<std::size_t>(run.training.ranks));
  comm::run_ranks(run.training.ranks, {}, [&](comm::ProcessGroup& world) {
    results[static_cast<std::size_t>(world.rank())] = train_saving_rank(world, run);
  });
  return results;
}

/// What rank 0 has.
inline CheckpointResult train_saving(const CheckpointRun& run) {
  return std::move(train_saving_all(run).front());
}

/// Does `run` go on from its checkpoint of `step`, without saving or meddling, to the values that
/// it has when it is trained whole in `empty_folder`?
inline bool goes_on_unharmed(CheckpointRun run, int step, const std::string& empty_folder) {
  run.save_every = 0;
  run.behind_step = {};
  run.behind_save = {};
  const CheckpointResult resumed = train_saving(run);
  run.checkpoints.folder = empty_folder;
  return resumed.first_step == step && train_saving(run).values == resumed.values;
}

}  // namespace tessera::testing
