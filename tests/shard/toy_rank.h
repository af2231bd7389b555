// One rank of a test of sharding: the toy model, wrapped, and what it computes with.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "shard/fsdp.h"
#include "shard/optimizer/optimizer.h"
#include "tests/shard/toy_model.h"

namespace tessera::testing {

struct ToySetup {
  int blocks = 3;
  std::int64_t numel = 130;  ///< of each parameter
  bool poison = true;        ///< which waits for the last use of memory, and so hides other waits
  bool has_root = true;
  std::function<void(ToyModel&)> prepare = {};  ///< before it is wrapped
  std::optional<engine::Stream> compute = {};   ///< none: each rank has one of its own
};

struct ToyRank {
  explicit ToyRank(comm::ProcessGroup& world, const shard::FsdpOptions& options = {},
                   const ToySetup& setup = {})
      : numel(setup.numel),
        compute(setup.compute ? *setup.compute : engine::Stream::inline_cpu("compute")),
        memory(compute, {.poison = setup.poison}),
        model(setup.blocks, numel),
        fsdp(world, memory, compute, prepared_blocks(setup), setup.has_root ? &model.root : nullptr,
             options) {}

  /// A batch of which every element is `value`.
  engine::Tensor input(float value = 1) const { return input(value, value); }
  /// A batch of which every element is `value`, but the first is `first`.
  engine::Tensor input(float value, float first) const {
    std::vector<float> all(static_cast<std::size_t>(numel), value);
    all.front() = first;
    return engine::Tensor::from<float>(memory, {numel}, all, "x");
  }
  engine::Tensor loss(float value = 1) { return model.loss(tape, input(value)); }
  float evaluate() {
    const engine::Tensor y = tape.no_grad([&] { return loss(); });
    compute.synchronize();
    return y.item();
  }

  /// Of all parameters, whole; each is followed by its states in `optimizer`.
  std::vector<float> values(shard::Optimizer* optimizer = nullptr) {
    std::vector<float> all;
    const auto add = [&](const std::vector<float>& whole) {
      all.insert(all.end(), whole.begin(), whole.end());
    };
    for (const engine::Parameter* p : fsdp.parameters()) {
      add(fsdp.full_parameter(*p));
      if (optimizer == nullptr) continue;
      for (const std::string& name : optimizer->state_names()) add(optimizer->full_state(*p, name));
    }
    return all;
  }

  const std::int64_t numel;
  engine::Stream compute;
  engine::Memory memory;
  engine::Tape tape{memory, compute};
  ToyModel model;
  shard::Fsdp fsdp;

 private:
  std::vector<engine::Block*> prepared_blocks(const ToySetup& setup) {
    if (setup.prepare) setup.prepare(model);
    return model.blocks();
  }
};

}  // namespace tessera::testing
