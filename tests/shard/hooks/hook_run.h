// Steps with given gradients under a communication hook: what tests of hooks compare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/philox.h"
#include "shard/fsdp.h"
#include "shard/hooks/hook.h"
#include "shard/hooks/hook_kernels.h"
#include "shard/hooks/hooks.h"
#include "tests/shard/hooks/given_gradients.h"

namespace tessera::testing {

/// Of parameter `i` in micro-step `micro`, counted over all steps, on `rank`.
using GradientOf = std::function<std::vector<float>(int micro, int rank, std::size_t i)>;

struct HookRun {
  int ranks = 2;
  int steps = 3;
  int accum = 1;
  bool no_sync = false;  ///< in all micro-steps but the last
  /// Batches of `rank` in `step`, at most `accum`; if empty, each has `accum`, and nobody joins.
  std::function<int(int rank, int step)> num_batches = {};
  bool gives_up = false;  ///< before each step another one, after its first backward
  std::vector<engine::Shape> shapes = {{24, 10}, {7}, {9, 4, 5}};
  shard::HookOptions hook = {
      .kind = shard::HookKind::kPowerSgd,
      .powersgd = {.low_rank = {.rank = 2, .min_compression_rate = 0}, .start_step = 0}};
  shard::FsdpOptions options = {.placement = shard::Placement::preset("ddp")};
  GradientOf gradient = {};  ///< default: standard normal
  int num_gpus = 0;          ///< 0: on the CPU
  bool poison = true;
  std::vector<shard::HookTensor> start = {};  ///< of all ranks, to be loaded before the first step
  int first_step = 0;                         ///< what gradients are counted from

  std::vector<float> gradient_of(int micro, int rank, std::size_t i) const;
  shard::FsdpOptions fsdp_options() const {
    shard::FsdpOptions all = options;
    all.reducer = make_hook(hook);
    all.reducer_text = describe(hook);
    return all;
  }
  engine::Stream compute(int rank) const {
    const engine::StreamOptions stream_options{.delay_seed = options.delay_seed};
    return num_gpus == 0 ? engine::Stream::inline_cpu("compute", stream_options)
                         : engine::Stream::cuda("compute", rank % num_gpus, stream_options);
  }
};

/// Parameters of several shapes under the hook `name`, which starts with the second step.
inline HookRun hook_run_of(const std::string& name, int ranks) {
  HookRun run{.ranks = ranks, .accum = 2, .shapes = {{24, 10}, {7}, {9, 4, 5}, {50}, {6, 6}}};
  set_hook(run.hook, name);
  run.hook.powersgd.start_step = 1;
  return run;
}

/// What a run leaves, rank by rank and step by step.
struct HookResult {
  using Values = std::vector<std::vector<float>>;     // of each parameter
  std::vector<std::vector<Values>> gradients;         // [rank][step]: mean, as every rank has it
  std::vector<std::vector<shard::HookTensor>> state;  // [step]: of all ranks
  std::vector<std::vector<float>> sums;               // [rank] of the last step, as it keeps them
  std::vector<std::vector<shard::HookTraffic>> traffic;  // [unit] of rank 0
  std::vector<std::string> not_finite;                   // [step]

  /// The elements of one parameter's error that part `part` has after `step`.
  std::vector<float> error(int step, const std::string& parameter, int part) const {
    std::vector<float> values;
    for (const shard::HookTensor& t : state[static_cast<std::size_t>(step)]) {
      if (t.name != "powersgd.error" || t.parameter != parameter || t.part != part) continue;
      values.resize(std::max(values.size(), static_cast<std::size_t>(t.begin) + t.values.size()));
      std::copy(t.values.begin(), t.values.end(), values.begin() + t.begin);
    }
    return values;
  }
};

inline std::vector<float> normals(std::int64_t numel, std::uint64_t seed) {
  const engine::RandomStream random{seed, 11};
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
  return values;
}

inline std::vector<float> HookRun::gradient_of(int micro, int rank, std::size_t i) const {
  if (gradient) return gradient(micro, rank, i);
  return normals(shapes[i].numel(), static_cast<std::uint64_t>(1000 * micro + 100 * rank) + i);
}

/// One rank of a run.
struct HookRank {
  HookRank(comm::ProcessGroup& world, const HookRun& of)
      : run(of),
        rank(world.rank()),
        compute(of.compute(rank)),
        memory(compute, {.poison = of.poison}),
        tape(memory, compute),
        model(of.shapes),
        fsdp(world, memory, compute, model.blocks(), &model.root, of.fsdp_options()) {}

  /// `micro` is counted over all steps.
  void backward(int micro) {
    model.run(tape, [&](std::size_t i) { return run.gradient_of(micro, rank, i); });
  }

  const HookRun& run;
  int rank;
  engine::Stream compute;
  engine::Memory memory;
  engine::Tape tape;
  GivenGradients model;
  shard::Fsdp fsdp;
};

/// What launch_keep_error() leaves of errors 7 for inputs and decompressed values of which the last
/// two have no finite difference, and in bf16 the second none.
inline std::vector<float> kept_errors(const engine::Stream& stream, engine::DType dtype,
                                      std::int64_t bad, bool in_place) {
  using engine::Category;
  const engine::Memory memory(stream);
  const auto tensor = [&](const std::vector<float>& values) {
    return engine::Tensor::from<float>(memory, {4}, values);
  };
  const engine::Tensor error = engine::Tensor::empty(memory, {4}, dtype);
  const engine::Tensor before = in_place ? error : engine::Tensor::empty(memory, {4}, dtype);
  engine::launch_set(stream, error, 5, "set");
  engine::launch_set(stream, before, 7, "set");
  const auto flag = engine::Tensor::from<std::int64_t>(memory, {1}, std::vector{bad});
  shard::launch_keep_error(stream, error, before, tensor({3, 3.4e38f, 3e38f, 1}),
                           tensor({1, 0, -3e38f, std::numeric_limits<float>::quiet_NaN()}), flag,
                           "");
  const auto out = engine::Tensor::empty(memory, {4}, engine::DType::kF32);
  engine::launch_assign_or_add(stream, out, error, false, "widen");
  return engine::to_vector<float>(out);
}

inline HookResult run_hook(const HookRun& run) {
  HookResult result;
  const auto ranks = static_cast<std::size_t>(run.ranks);
  result.gradients.resize(ranks);
  result.sums.resize(ranks);
  result.state.resize(static_cast<std::size_t>(run.steps));
  std::vector<std::vector<std::vector<shard::HookTensor>>> states(ranks);
  comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& world) {
    const int rank = world.rank();
    const auto r = static_cast<std::size_t>(rank);
    HookRank one(world, run);
    shard::Fsdp& fsdp = one.fsdp;
    if (!run.start.empty()) load_hooks(fsdp, run.start);
    for (int step = 0; step < run.steps; ++step) {
      const auto backward = [&](int micro) {
        one.backward((run.first_step + step) * run.accum + micro);
      };
      if (run.gives_up) {
        fsdp.begin_step(run.accum);
        backward(0);
        fsdp.cancel_step();
      }
      const int batches = run.num_batches ? run.num_batches(rank, step) : run.accum;
      const int accum = run.num_batches ? fsdp.join(batches) : run.accum;
      for (int micro = 0; micro < accum; ++micro) {
        const shard::MicroStep micro_step{.no_sync = run.no_sync && micro + 1 < accum};
        if (micro == 0) {
          fsdp.begin_step(accum, micro_step);
        } else {
          fsdp.next_micro_step(micro_step);
        }
        if (micro < batches) backward(micro);
      }
      const shard::GradNorm norm = fsdp.finish_step();
      if (rank == 0) result.not_finite.push_back(norm.not_finite());
      HookResult::Values mean;
      for (const auto& p : one.model.parameters) mean.push_back(fsdp.full_gradient(*p));
      result.gradients[r].push_back(std::move(mean));
      states[r].push_back(save_hooks(fsdp));
    }
    for (const auto& unit : fsdp.units()) {
      const std::vector<float> sums = engine::to_vector<float>(unit->reducer()->sum());
      const shard::Flat& flat = unit->flats().front();
      for (const shard::Segment& s : flat.layout.segments(flat.gradient_range)) {
        result.sums[r].insert(result.sums[r].end(), sums.begin() + s.shard_begin,
                              sums.begin() + s.shard_begin + s.numel);
      }
      const auto* hook = dynamic_cast<shard::HookReducer*>(unit->reducer());
      if (rank == 0 && hook != nullptr) {
        result.traffic.push_back(hook->traffic());
        for (auto& t : result.traffic.back()) t.parameter = nullptr;  // dies with the model
      }
    }
  });
  for (std::size_t step = 0; step < result.state.size(); ++step) {
    for (const auto& of_rank : states) {
      result.state[step].insert(result.state[step].end(), of_rank[step].begin(),
                                of_rank[step].end());
    }
  }
  return result;
}

}  // namespace tessera::testing
