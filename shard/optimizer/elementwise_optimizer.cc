#include "shard/optimizer/elementwise_optimizer.h"

#include <optional>
#include <utility>

#include "engine/copy.h"

namespace tessera::shard {

using engine::Stream;
using engine::Tensor;

namespace {

OptimizerTraits elementwise(OptimizerTraits traits) {
  traits.is_elementwise = true;
  return traits;
}

}  // namespace

ElementwiseOptimizer::ElementwiseOptimizer(Fsdp& fsdp, OptimizerTraits traits)
    : Optimizer(fsdp, elementwise(std::move(traits))) {
  for (const auto& unit : fsdp.units()) create_parts(*unit);
  stage_updates();
  if (fsdp.compute().device().is_cuda()) {
    num_steps_on_gpu_ = Tensor::zeros(fsdp.memory(), {1}, engine::DType::kI32,
                                      "optimizer.num_steps", engine::Category::kOptimizer);
  }
}

void ElementwiseOptimizer::create_parts(const Unit& unit) {
  if (const Flat* flat = unit.trainable()) parts_[&unit] = parts_of(*flat, fsdp(), unit.name());
}

void ElementwiseOptimizer::stage_updates() {
  if (fsdp().offload() == nullptr) return;
  std::vector<UpdateParts::Cut> cuts;
  for (const auto& [unit, parts] : parts_) cuts.push_back({unit->trainable(), &parts});
  offloaded_ = std::make_unique<UpdateParts>(fsdp(), cuts);
}

void ElementwiseOptimizer::before_recut(const Unit& unit) {
  Optimizer::before_recut(unit);
  offloaded_.reset();  // staging for other parts
  parts_.erase(&unit);
}

void ElementwiseOptimizer::after_recut(const Unit& unit) {
  create_parts(unit);
  Optimizer::after_recut(unit);
}

// For one call by a thread of the host, which must not be the last to hold what is the GPU's
// (Event::for_host). So norms are kept here until that thread is past them.
std::function<ElementwiseOptimizer::HostStep()> ElementwiseOptimizer::host_step_of(
    const Step& step) {
  if (!step.norm) {
    return [clip = step.clip, &count = num_steps_on_host_]() -> HostStep {
      return {.skips = false, .clip = clip, .num_steps = ++count};
    };
  }
  while (!norms_in_use_.empty() && norms_in_use_.front().read.reached()) norms_in_use_.pop_front();
  norms_in_use_.push_back({*step.norm, {}});
  return [norm_of = step.norm->unchecked_value_for_host(), max_norm = step.max_norm,
          &count = num_steps_on_host_]() -> HostStep {
    const std::optional<float> value = norm_of();
    if (!value) return {.skips = true, .clip = 1, .num_steps = count};
    return {.skips = false, .clip = clip_scale(*value, max_norm), .num_steps = ++count};
  };
}

void ElementwiseOptimizer::prepare(const Step& step) {
  if (offloaded_ == nullptr) stage_updates();  // units were laid out again
  if (!fsdp().compute().device().is_cuda() || fsdp().options().offload.optimizer == 0) {
    return prepare_parts(step, nullptr);
  }
  const std::span<const Stream> hosts = fsdp().offload()->hosts();
  const HostPart host{hosts.front(), host_step_of(step)};
  prepare_parts(step, &host);
  const engine::Event prepared = host.stream.record("prepared");
  if (!norms_in_use_.empty()) norms_in_use_.back().read = prepared;
  for (const Stream& stream : hosts) stream.wait(prepared);
}

void ElementwiseOptimizer::update_unit(UnitUpdate& u) {
  const auto update_part = [&](const UpdatePart& part, const Tensor& master, const Tensor& grad_sum,
                               const Stream& at) {
    std::vector<Tensor> states;
    for (const SplitTensor& state : u.states) {
      const SplitTensor s = state.slice(part.range.begin, part.range.numel);
      states.push_back(part.is_on_host ? s.host() : s.device());
    }
    update({u.unit.name(), u.flat, master, grad_sum, part.segments, part.tiles, std::move(states),
            u.groups, u.groups_on_gpu},
           at);
  };
  const std::vector<UpdatePart>& parts = parts_.at(&u.unit);
  if (fsdp().offload() == nullptr) {
    return update_part(parts.front(), u.flat.master.device(), u.flat.grad_sum.device(), u.stream);
  }
  UpdateParts::Written written = offloaded_->run(u.flat, parts, u.unit, u.stream, update_part);
  u.stream = written.by;
  u.on_host = std::move(written.on_host);
}

std::int64_t ElementwiseOptimizer::num_steps() const {
  if (!num_steps_on_gpu_.defined()) return Optimizer::num_steps();
  return engine::to_vector<std::int32_t>(num_steps_on_gpu_).front();
}

void ElementwiseOptimizer::set_num_steps(std::int64_t num_steps) {
  Optimizer::set_num_steps(num_steps);
  if (!num_steps_on_gpu_.defined()) return;
  if (fsdp().offload() != nullptr) fsdp().offload()->synchronize();
  num_steps_on_host_ = num_steps;
  const auto count = static_cast<std::int32_t>(num_steps);
  num_steps_on_gpu_.copy_from_host(&count, 1);
}

}  // namespace tessera::shard
