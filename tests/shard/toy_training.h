// Training of the toy model: what tests of sharding compare.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"

namespace tessera::testing {

struct Training {
  int ranks = 2;
  int accum = 1;
  int steps = 3;
  int blocks = 3;
  std::int64_t numel = 300;
  bool recompute = false;
  int rounds = 1;      ///< of the layers in one forward
  bool rests = false;  ///< the second step and the last leave the layers out
  bool adamw = false;
  /// With `adamw`: each layer's weight and bias are groups of their own, with learning rates and
  /// decays that differ, of which those of one change before each step but the first.
  bool many_groups = false;
  double max_norm = 0;
  double lr_decay = 0;
  bool poison = false;
  std::uint64_t delay_seed = 0;
  shard::FsdpOptions options = {};
  bool no_sync = false;                                  ///< in all micro-steps but the last
  std::optional<shard::UpdateGathers> in_backward = {};  ///< with max_norm 0: how updates are made
  int num_gpus = 0;  ///< 0: on the CPU; else rank r runs on GPU first_gpu + r % num_gpus
  int first_gpu = 0;
  bool cache = true;
  /// On a GPU, with one rank: steps from this one on are one graph. Negative: none are.
  int graph_from = -1;
  /// Called after each launch of that graph.
  std::function<void(shard::Fsdp&, engine::Tape&, ToyModel&)> between_steps = {};
  /// On every rank; one for which it is false stops there and returns nothing.
  std::function<bool(comm::ProcessGroup&, int step)> before_step = {};

  engine::Stream compute(int rank) const {
    const engine::StreamOptions stream_options{.delay_seed = delay_seed};
    return num_gpus == 0
               ? engine::Stream::inline_cpu("compute", stream_options)
               : engine::Stream::cuda("compute", first_gpu + rank % num_gpus, stream_options);
  }
};

inline std::vector<shard::ParameterGroup> groups_of(const ToyModel& model) {
  std::vector<shard::ParameterGroup> groups;
  for (const auto& layer : model.layers) {
    for (const engine::Parameter* p : {&layer->weight, &layer->bias}) {
      const double number = static_cast<double>(groups.size());
      groups.push_back({.name = "group " + std::to_string(groups.size()),
                        .parameters = {p->name},
                        .lr_scale = 1 + 0.1 * number,
                        .weight_decay = 1 / (1 + number)});
    }
  }
  return groups;
}

/// One rank's part of train(): every parameter and norm, in order.
inline std::vector<float> train_rank(comm::ProcessGroup& world, const Training& run) {
  const engine::Stream compute = run.compute(world.rank());
  const engine::Memory memory(compute, {.cache = run.cache, .poison = run.poison});
  engine::Tape tape(memory, compute);
  ToyModel model(run.blocks, run.numel);
  shard::FsdpOptions options = run.options;
  options.delay_seed = run.delay_seed;
  shard::Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
  std::unique_ptr<shard::Optimizer> optimizer;
  if (run.adamw) {
    shard::AdamWOptions adamw;
    if (run.many_groups) adamw.groups = groups_of(model);
    optimizer = std::make_unique<shard::AdamW>(fsdp, std::move(adamw));
  } else {
    optimizer = std::make_unique<shard::Sgd>(fsdp, shard::SgdOptions{.momentum = 0.9});
  }
  const auto batch_of = [&](int step, int micro) {
    const int number = (step * run.accum + micro) * world.size() + world.rank();
    const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
    std::vector<float> values(static_cast<std::size_t>(run.numel));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
    return values;
  };
  const auto rate_of = [&](int step) { return 1e-3 / (1 + run.lr_decay * step); };
  // All of a step, with the batch that `next` gives.
  const auto make_step = [&](int step, const std::function<engine::Tensor(int micro)>& next) {
    if (run.in_backward) optimizer->step_in_backward(rate_of(step), *run.in_backward);
    for (int micro = 0; micro < run.accum; ++micro) {
      const shard::MicroStep micro_step{.no_sync = run.no_sync && micro + 1 < run.accum};
      if (micro == 0) {
        fsdp.begin_step(run.accum, micro_step);
      } else {
        fsdp.next_micro_step(micro_step);
      }
      const bool rests = run.rests && (step == 1 || step + 1 == run.steps);
      tape.backward(model.loss(tape, next(micro), run.recompute, rests ? 0 : run.rounds));
    }
    shard::GradNorm norm = fsdp.finish_step();
    if (!run.in_backward) optimizer->step(rate_of(step), norm, run.max_norm);
    return norm;
  };
  std::vector<shard::GradNorm> norms;
  std::vector<engine::Tensor> inputs;  // of the graph
  std::optional<shard::GradNorm> captured;
  std::function<void()> launch;
  for (int step = 0; step < run.steps; ++step) {
    if (run.before_step && !run.before_step(world, step)) return {};
    if (run.many_groups && step > 0) {
      const int number = (step * 67 + 2) % (2 * run.blocks);
      optimizer->group("group " + std::to_string(number)).lr_scale *= 0.5;
    }
    if (run.graph_from < 0 || step < run.graph_from) {
      norms.push_back(make_step(step, [&](int micro) {
        return engine::Tensor::from<float>(memory, {run.numel}, batch_of(step, micro), "x");
      }));
      continue;
    }
    if (!launch) {
      for (int micro = 0; micro < run.accum; ++micro) {
        inputs.push_back(engine::Tensor::zeros(memory, {run.numel}, engine::DType::kF32, "x"));
      }
      launch = fsdp.capture_step(
          [&] { captured = make_step(-1, [&](int micro) { return inputs[std::size_t(micro)]; }); });
    }
    for (int micro = 0; micro < run.accum; ++micro) {
      inputs[std::size_t(micro)].copy_from_host(batch_of(step, micro).data(), run.numel);
    }
    optimizer->repeat_step(rate_of(step));
    launch();
    norms.push_back(fsdp.read_norm(*captured));
    if (run.between_steps) run.between_steps(fsdp, tape, model);
  }
  std::vector<float> mine;
  for (const shard::GradNorm& norm : norms) mine.push_back(norm.value());
  for (const engine::Parameter* p : fsdp.parameters()) {
    const std::vector<float> values = fsdp.full_parameter(*p);
    mine.insert(mine.end(), values.begin(), values.end());
  }
  return mine;
}

/// Trains and returns what rank 0 has. The data of micro-step m of step s on rank r are those of
/// global number (s * accum + m) * ranks + r.
inline std::vector<float> train(const Training& run) {
  std::vector<float> result;
  comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& world) {
    const std::vector<float> mine = train_rank(world, run);
    if (world.rank() == 0) result = mine;
  });
  return result;
}

/// The collectives of rank 0 in one step, as text.
inline std::vector<std::string> collectives_of_step(int step, const Training& run) {
  std::vector<std::string> lines;
  comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& ranks) {
    CollectiveLog log;
    LoggedGroup world(ranks, log);
    const engine::Stream compute = run.compute(world.rank());
    const engine::Memory memory(compute);
    engine::Tape tape(memory, compute);
    ToyModel model(run.blocks, run.numel);
    shard::Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, run.options);
    for (int s = 0; s <= step; ++s) {
      log.take();
      fsdp.begin_step();
      tape.backward(model.loss(
          tape, engine::Tensor::zeros(memory, {run.numel}, engine::DType::kF32), run.recompute));
      fsdp.finish_step();
    }
    if (world.rank() == 0) lines = log.take();
  });
  return lines;
}

}  // namespace tessera::testing
