// A step that is captured once and run again as one launch of a GPU.
#include <memory>
#include <utility>
#include <vector>

#include "engine/cuda_graph.h"
#include "engine/error.h"
#include "shard/cut_values.h"
#include "shard/fsdp.h"

namespace tessera::shard {

using engine::require;

// [Note: a step as a graph]
// A graph repeats what the device did, with the addresses it had. So each step has to begin and end
// alike on the host: no unit is gathered, all slots are free. What a step gathers ahead for the
// next one is therefore left out, and the graph begins with it. Everything
// else that the host keeps from step to step - the plan of the schedule, events, counts of visits -
// is the same after each step, and events of the capture stand for the last launch. What changes
// is read from the device: learning rates (Optimizer::repeat_step()), the number of updates, the
// norm that clips. With several ranks collectives would have to be part of the graph, and what
// ranks tell each other of them be told without the calls: not yet.

void Fsdp::check_can_capture() const {
  const FsdpOptions& options = context_.options;
  require(compute_.device().is_cuda() && !compute_.device().is_meta,
          "[fsdp] expected a GPU to capture a step on, got {}", to_string(compute_.device()));
  require(group_.size() == 1, "[fsdp] expected one rank to capture a step of, got {}",
          group_.size());
  require(context_.offload == nullptr,
          "[fsdp] expected nothing offloaded in a step that is captured, as the host takes part");
  require(!options.reducer && !options.check_gradients &&
              options.unused_parameters == UnusedParameters::kZero,
          "[fsdp] expected neither a reducer of one's own, nor check_gradients, nor "
          "UnusedParameters::kSkip in a step that is captured: the host takes part in each of "
          "their steps");
  require(options.step_listener == nullptr && options.listener == nullptr,
          "[fsdp] expected nobody to listen to a step that is captured, got a listener");
  require(!joined_ && !early_,
          "[fsdp] expected a step that is captured without join() and step_in_backward()");
}

// Where each captured step begins.
void Fsdp::rest() {
  CutValues(*this).check_at_rest("a captured step");
  check_can_train("a captured step");
  wait_for_readers();
  schedule_.cancel(compute_);
  schedule_.renew_stale(compute_);
}

std::function<void()> Fsdp::capture_step(const std::function<void()>& step) {
  check_can_capture();
  rest();
  if constexpr (engine::kCudaBuilt) {
    std::shared_ptr<engine::CudaGraph> graph;
    try {
      graph = std::make_shared<engine::CudaGraph>(
          context_.memory, std::vector{context_.gather, context_.reduce}, [&] {
            step();
            require(phase_ == Phase::kIdle,
                    "[fsdp] expected a whole step to capture, from begin_step() to its update");
          });
    } catch (...) {
      if (phase_ == Phase::kStep) cancel_step();
      phase_ = Phase::kIdle;
      throw;
    }
    return [this, graph] {
      rest();
      graph->launch();
    };
  }
  return {};
}

GradNorm Fsdp::read_norm(const GradNorm& captured) {
  std::erase_if(norms_in_flight_, [](const GradNorm& n) { return n.is_known(); });
  return norms_in_flight_.emplace_back(copy_norm(context_, compute_, captured));
}

}  // namespace tessera::shard
