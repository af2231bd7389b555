// A small mixture of experts, with experts on every rank or spread over an expert-parallel group.
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "comm/threads.h"
#include "engine/copy.h"
#include "ops/add.h"
#include "ops/cross_entropy.h"
#include "ops/dispatch.h"
#include "ops/linear.h"
#include "ops/relu.h"
#include "ops/route.h"
#include "ops/scale.h"
#include "ops/sum.h"
#include "shard/all_to_all.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/initialise.h"
#include "shard/joint_norm.h"
#include "shard/optimizer/sgd.h"

namespace tessera::testing {

struct MoeOptions {
  std::int64_t num_experts = 4, k = 2, rows = 12, width = 8, hidden = 16, capacity = 5;
  /// Whole numbers, gates of 1 and a loss that is a sum: no sum is rounded, so its order is free.
  bool exact = false;
};

// Expert e belongs to rank e % size() of the expert-parallel group, as its expert e / size().
class Moe {
 public:
  Moe(const MoeOptions& options, comm::ProcessGroup& exchange)
      : in{"in", {options.width, options.width}, engine::Init::normal(0.5f)},
        router{"router", {options.width, options.num_experts}, engine::Init::normal(1)},
        out{"out", {options.width, options.width}, engine::Init::normal(0.5f)},
        root{"root", {&in, &router, &out}},
        options_(options),
        exchange_(exchange) {
    for (std::int64_t e = exchange.rank(); e < options.num_experts; e += exchange.size()) {
      experts.push_back(std::make_unique<Expert>("expert." + std::to_string(e), options));
    }
  }

  std::vector<engine::Block*> expert_blocks() {
    std::vector<engine::Block*> all;
    for (auto& e : experts) all.push_back(&e->block);
    return all;
  }

  // x (rows, width) -> scalar.
  engine::Tensor loss(engine::Tape& tape, const engine::Tensor& x, const engine::Tensor& targets,
                      bool recompute) {
    return tape.region(root, [&] {
      const engine::Tensor h = ops::linear(tape, x, in, nullptr);
      const ops::Routing r =
          ops::route(tape, ops::linear(tape, h, router, nullptr),
                     {options_.k, options_.capacity, /*renormalise=*/options_.exact});
      const auto num_local = static_cast<std::int64_t>(experts.size());
      auto rows = ops::dispatch(tape, h, r.slots, num_local, exchange_.size() * options_.capacity);
      for (std::size_t i = 0; i < experts.size(); ++i) {
        rows[i] = tape.region(
            experts[i]->block,
            [this, &tape, &e = *experts[i], sent = rows[i], number = std::to_string(i)] {
              using shard::all_to_all;
              engine::Tensor t = all_to_all(tape, exchange_, sent, "tokens " + number);
              t = ops::linear(tape, t, e.w1, nullptr);
              t = ops::linear(tape, options_.exact ? t : ops::relu(tape, t), e.w2, nullptr);
              return all_to_all(tape, exchange_, t, "results " + number);
            },
            {.recompute = recompute});
      }
      const engine::Tensor y = ops::combine(tape, rows, r.gates, r.slots);
      if (options_.exact) return ops::sum(tape, ops::linear(tape, y, out, nullptr));
      const engine::Tensor logits = ops::linear(tape, ops::add(tape, y, h), out, nullptr);
      const engine::Tensor mean = ops::cross_entropy(tape, logits, targets);
      return ops::add(tape, mean, ops::scale(tape, r.aux, 0.01f));
    });
  }

  struct Expert {
    Expert(const std::string& name, const MoeOptions& o)
        : w1{name + ".w1", {o.width, o.hidden}, engine::Init::normal(0.5f)},
          w2{name + ".w2", {o.hidden, o.width}, engine::Init::normal(0.5f)},
          block{name, {&w1, &w2}} {}

    engine::Parameter w1, w2;
    engine::Block block;
  };
  engine::Parameter in, router, out;
  engine::Block root;
  std::vector<std::unique_ptr<Expert>> experts;

 private:
  MoeOptions options_;
  comm::ProcessGroup& exchange_;
};

/// Of step 1, whose sum of gradients is not finite on the ranks of one group: of the dense
/// parameters', or of the last experts' alone.
enum class MoeFault { kNone, kStepLeftOut, kDense, kExperts };

struct MoeRun {
  int ranks = 1, expert_ranks = 1, accum = 1, steps = 3;
  double max_norm = 0;
  bool recompute = false, is_delayed = false;  // communication

  int num_gpus = 0;
  MoeOptions model = {};
  shard::FsdpOptions dense = {}, experts = {};
  std::optional<shard::UpdateGathers> in_backward = {};  ///< with max_norm 0: how updates are made
  MoeFault fault = MoeFault::kNone;
  /// Goes on from the newest checkpoint there, if any, and saves after the last step.
  std::string folder = {};
  bool saves_async = false;
};

/// What a rank has sent since it was set up, and held, by the end of a step.
struct MoeBooks {
  comm::Traffic traffic;
  engine::MemoryStats memory;
};

struct MoeResult {
  std::map<int, std::vector<MoeBooks>> books;  // of each rank, by step
  std::vector<float> norms;                    // of each step made, on every rank alike
  std::string not_finite;                      // JointNorm::not_finite() of the others
  std::int64_t num_steps = 0;                  // of both optimizers
  std::vector<std::pair<std::string, std::vector<float>>> parameters;  // and states, by name
};

inline void whole_numbers(const engine::Parameter& p, std::span<float> values) {
  const engine::RandomStream random{11, engine::fnv1a(p.name)};
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(random.bits(i) % 5) - 2;
  }
}

// After the last backward of a step.
inline void spoil_gradients(const shard::Fsdp& fsdp) {
  fsdp.synchronize();
  fsdp.compute().synchronize();
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      for (const shard::Segment& s : flat.segments) {
        const shard::SplitTensor sum = flat.grad_sum.slice(s.shard_begin, s.numel);
        const engine::Tensor g = sum.device().defined() ? sum.device() : sum.host();
        const float inf = std::numeric_limits<float>::infinity();
        g.slice(0, {1}).copy_from_host(&inf, 1);
      }
    }
  }
}

// One rank's part; on a meta device its books alone.
inline void train_moe_rank(comm::ProcessGroup& world, const engine::Stream& compute,
                           const MoeRun& run, MoeResult& result, std::mutex& mutex) {
  using engine::Tensor;
  const std::uint64_t seed = run.is_delayed ? 100 + static_cast<std::uint64_t>(world.rank()) : 0;
  const engine::Memory memory(compute, {.poison = true});
  engine::Tape tape(memory, compute);
  // Ranks of one expert-parallel group lie beside each other; `owners` hold the same experts.
  const auto exchange = world.split_by([&](int rank) { return rank / run.expert_ranks; });
  const auto owners = world.split_by([&](int rank) { return rank % run.expert_ranks; });
  Moe model(run.model, *exchange);
  shard::FsdpOptions dense_options = run.dense, experts_options = run.experts;
  experts_options.mean_ranks = world.size();
  dense_options.delay_seed = experts_options.delay_seed = seed;
  shard::Fsdp dense(world, memory, compute, {}, &model.root, dense_options);
  shard::Fsdp experts(*owners, memory, compute, model.expert_blocks(), nullptr, experts_options);
  if (run.model.exact) {
    shard::initialise(dense, whole_numbers);
    shard::initialise(experts, whole_numbers);
  }
  shard::Sgd dense_optimizer(dense, {.momentum = 0.5}),
      expert_optimizer(experts, {.momentum = 0.5});
  std::vector<float> norms;
  std::string not_finite;
  const comm::Traffic set_up = world.traffic();  // ranks that are there agree on their plans
  std::vector<MoeBooks> books;
  std::unique_ptr<shard::Checkpointer> checkpointer;
  int step = 0;
  if (!run.folder.empty()) {
    checkpointer = std::make_unique<shard::Checkpointer>(
        world,
        std::vector<shard::CheckpointPart>{{&dense, &dense_optimizer},
                                           {&experts, &expert_optimizer}},
        shard::CheckpointerOptions{.folder = run.folder, .async = run.saves_async});
    if (const auto loaded = checkpointer->load_newest()) step = static_cast<int>(loaded->step);
  }
  const double lr = run.model.exact ? 0x1p-10 : 0.1;
  for (; step < run.steps; ++step) {
    if (step == 1 && run.fault == MoeFault::kStepLeftOut) continue;
    if (run.in_backward) {
      dense_optimizer.step_in_backward(lr, *run.in_backward);
      expert_optimizer.step_in_backward(lr, *run.in_backward);
    }
    for (int micro = 0; micro < run.accum; ++micro) {
      for (shard::Fsdp* fsdp : {&dense, &experts}) {
        micro == 0 ? fsdp->begin_step(run.accum) : fsdp->next_micro_step();
      }
      const int number = (step * run.accum + micro) * world.size() + world.rank();
      const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
      const auto [num_experts, k, rows, width, hidden, capacity, exact] = run.model;
      std::vector<float> values(static_cast<std::size_t>(rows * width));
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = exact ? static_cast<float>(random.bits(i) % 3) - 1 : random.normal(i);
      }
      std::vector<std::int32_t> targets(static_cast<std::size_t>(rows));
      for (std::size_t i = 0; i < targets.size(); ++i) {
        targets[i] =
            static_cast<std::int32_t>(random.bits(1000 + i) % static_cast<std::uint32_t>(width));
      }
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {rows, width}, values, "x"),
                               Tensor::from<std::int32_t>(memory, {rows}, targets, "targets"),
                               run.recompute));
    }
    const bool has_last_experts = world.rank() % run.expert_ranks == run.expert_ranks - 1;
    if (step == 1 && run.fault == MoeFault::kDense) spoil_gradients(dense);
    if (step == 1 && run.fault == MoeFault::kExperts && has_last_experts) spoil_gradients(experts);
    const shard::GradNorm dense_norm = dense.finish_step(), expert_norm = experts.finish_step();
    const std::vector<shard::NormPart> parts = {{dense, dense_norm}, {experts, expert_norm}};
    const shard::JointNorm norm = shard::joint_norm(world, parts);
    if (norm.not_finite().empty()) {
      norms.push_back(norm.value());
    } else {
      not_finite = norm.not_finite();
    }
    if (!run.in_backward) {
      dense_optimizer.step(lr, norm, run.max_norm);
      expert_optimizer.step(lr, norm, run.max_norm);
    }
    compute.synchronize();
    const comm::Traffic now = world.traffic();
    books.push_back(
        {{now.num_collectives - set_up.num_collectives, now.bytes_sent - set_up.bytes_sent},
         memory.stats()});
  }
  if (checkpointer != nullptr) {
    checkpointer->save(step, {});
    checkpointer->wait();
  }
  if (compute.device().is_meta) {
    result.books[world.rank()] = std::move(books);
    return;
  }
  std::vector<std::pair<std::string, std::vector<float>>> mine;
  const auto take = [&](shard::Fsdp& fsdp, shard::Optimizer& optimizer) {
    for (const engine::Parameter* p : fsdp.parameters()) {
      mine.emplace_back(p->name, fsdp.full_parameter(*p));
      mine.emplace_back(p->name + ", velocity", optimizer.full_state(*p, "velocity"));
    }
    return optimizer.num_steps();
  };
  const std::int64_t num_steps = take(dense, dense_optimizer);
  EXPECT_EQ(take(experts, expert_optimizer), num_steps) << "rank " << world.rank();
  const std::lock_guard lock(mutex);
  result.books[world.rank()] = std::move(books);
  if (result.norms.empty()) {
    result.norms = norms;
    result.not_finite = not_finite;
    result.num_steps = num_steps;
  }
  EXPECT_EQ(result.norms, norms) << "rank " << world.rank();
  EXPECT_EQ(result.not_finite, not_finite) << "rank " << world.rank();
  EXPECT_EQ(result.num_steps, num_steps) << "rank " << world.rank();
  for (auto& p : mine) {
    const auto it =
        std::ranges::find(result.parameters, p.first, [](const auto& q) { return q.first; });
    if (it == result.parameters.end()) {
      result.parameters.push_back(std::move(p));
    } else {
      EXPECT_EQ(it->second, p.second) << p.first << ", rank " << world.rank();
    }
  }
}

inline MoeResult train_moe(const MoeRun& run) {
  MoeResult result;
  std::mutex mutex;
  comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& world) {
    const auto compute = run.num_gpus > 0
                             ? engine::Stream::cuda("compute", world.rank() % run.num_gpus)
                             : engine::Stream::inline_cpu("compute");
    train_moe_rank(world, compute, run, result, mutex);
  });
  std::ranges::sort(result.parameters);
  return result;
}

}  // namespace tessera::testing
