// Steps of a Trainer as CUDA graphs.
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

using engine::Category;
using engine::DType;
using engine::Tensor;

// [Note: steps as graphs]
// On one GPU a step, from the first forward to the update, can be one launch of a CUDA graph (see
// engine/cuda_graph.h and [Note: a step as a graph] in shard/fsdp_graph.cc), which small models,
// whose kernels are shorter than their launches, gain from. What changes from step to step is
// written to the device before: the batches, copied to tensors of the graph's own, the number of
// samples since the capture, for dropout, and the learning rate. What a step leaves is copied out
// afterwards: losses and the norm. All else - checkpoints, validations, what the log says - is as
// without.

// What a graph reads and writes, if steps are to be graphs.
void Trainer::create_graph(const std::vector<BatchTensor>& tensors) {
  if (!uses_graphs(config_, world_.size(), compute_.device().is_cuda())) return;
  const std::int64_t accum = config_.train.accum;
  graph_ = std::make_unique<StepGraph>();
  for (std::int64_t micro = 0; micro < accum; ++micro) {
    Batch& batch = graph_->batches.emplace_back();
    for (const BatchTensor& t : tensors) {
      batch.push_back(Tensor::zeros(memory_, t.shape, t.dtype, t.name));
    }
  }
  graph_->losses = Tensor::zeros(memory_, {accum}, DType::kF32, "losses", Category::kCommunication);
  graph_->samples_before =
      Tensor::zeros(memory_, {1}, DType::kI64, "samples_before", Category::kCommunication);
}

Tensor Trainer::samples_before() const {
  return graph_ && graph_->is_capturing ? graph_->samples_before : Tensor();
}

// Whether the step is to be launched as a graph, which is captured first if there is none yet. What
// keeps CUDA from it is no reason to end a run that did not ask for graphs: nothing was done yet.
bool Trainer::captures(std::int64_t step, const Loss& loss) {
  if (!graph_ || compute_.device().is_meta || graph_->has_failed) return false;
  if (step < start_.step + kStepsBeforeGraph) return false;
  if (graph_->launch) return true;
  const auto give_up = [&](const std::exception& e) {
    tape_.clear();  // of what was recorded until then
    graph_->has_failed = true;
    graph_->is_capturing = false;
    if (config_.cuda.graph == GraphChoice::kOn) throw;
    if (log_ == nullptr) return;
    log_->say(fmt::format("warning: cuda graph: none, as step {} could not be captured: {}",
                          step + 1, e.what()),
              Console::Style::kWarning);
  };
  try {
    capture(step, loss);
  } catch (const engine::InvalidArgument& e) {
    give_up(e);
  } catch (const engine::DeviceError& e) {
    give_up(e);
  }
  return !graph_->has_failed;
}

void Trainer::capture(std::int64_t step, const Loss& loss) {
  const StepConfig& c = config_.train;
  StepGraph& graph = *graph_;
  graph.captured_step = step;
  graph.is_capturing = true;
  graph.launch = fsdp_.capture_step([&] {
    graph.norm = run_passes(
        step, loss, graph.losses,
        [&](std::int64_t micro) -> const Batch& {
          return graph.batches[static_cast<std::size_t>(micro)];
        },
        nullptr);
    optimizer_->step(c.lr_at(step), *graph.norm, c.grad_clip);
  });
  graph.is_capturing = false;
}

shard::GradNorm Trainer::run_graph(std::int64_t step, const Tensor& values, StepClock& clock) {
  const StepConfig& c = config_.train;
  StepGraph& graph = *graph_;
  for (const Batch& batch : graph.batches) {
    clock.lap(StepPart::kOther);
    const Batch& next = batches_->next();
    clock.lap(StepPart::kData);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      engine::copy(batch[i], next[i], compute_, "graph_batch");
    }
  }
  const std::int64_t before =
      first_sample(step * c.accum) - first_sample(graph.captured_step * c.accum);
  engine::launch_store(compute_, graph.samples_before, std::as_bytes(std::span(&before, 1)),
                       "samples_before");
  optimizer_->repeat_step(c.lr_at(step));
  graph.launch();
  engine::copy(values.slice(0, {c.accum}), graph.losses, compute_, "keep_losses");
  return fsdp_.read_norm(*graph.norm);
}

}  // namespace tessera::tools
