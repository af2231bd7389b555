// Values by parameter, whole, however they are cut.
#include <algorithm>
#include <functional>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/cut_values.h"
#include "shard/fsdp.h"

namespace tessera::shard {

using engine::Category;
using engine::DType;
using engine::Parameter;
using engine::require;
using engine::Stream;
using engine::Tensor;

std::vector<Parameter*> Fsdp::parameters() const {
  std::vector<Parameter*> all;
  for (const auto& unit : units_) {
    for (const Flat& flat : unit->flats()) {
      all.insert(all.end(), flat.parameters.begin(), flat.parameters.end());
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Parameter* a, const Parameter* b) { return a->name < b->name; });
  return all;
}

Location Fsdp::location_of(const Parameter& p) const {
  for (const auto& unit : units_) {
    for (const Flat& flat : unit->flats()) {
      const auto it = std::find(flat.parameters.begin(), flat.parameters.end(), &p);
      if (it == flat.parameters.end()) continue;
      return {flat, static_cast<std::size_t>(it - flat.parameters.begin())};
    }
  }
  engine::fail("[fsdp] expected a wrapped parameter ({})", p.name);
}

Tensor Fsdp::gather(const Flat& flat, const Tensor& owned, const Stream& stream,
                    const std::string& label) {
  require(!stream.device().is_cuda() || stream == compute_,
          "[fsdp] expected to gather on the compute stream, whose memory it takes, got '{}' ({})",
          stream.name(), label);
  const std::vector<comm::ProcessGroup*> groups = context_.mesh.gathers_of(flat.owner);
  if (groups.empty()) return owned;
  const Tensor all = Tensor::empty(context_.memory, {flat.layout.flat_numel()}, owned.dtype(),
                                   label, Category::kWorkspace);
  engine::launch_assign_or_add(stream, all.slice(flat.owned.begin, owned.shape()), owned, false,
                               "copy", label);
  within(stream, [&] { gather_parts(groups, all, flat.owned, context_.gather, label); });
  return all;
}

std::vector<float> Fsdp::full_parameter(const Parameter& p) {
  const Location at = location_of(p);
  return CutValues(*this).full(at, at.flat.master);
}

std::vector<float> Fsdp::full_gradient(const Parameter& p) {
  const Location at = location_of(p);
  require(at.flat.trainable, "[fsdp] expected a trainable parameter, got a frozen one ({})",
          p.name);
  require(phase_ == Phase::kFinished,
          "[fsdp] expected finish_step() before, and the optimizer after, full_gradient() ({})",
          p.name);
  std::vector<float> values = CutValues(*this).full(at, at.flat.grad_sum);
  const auto scale = static_cast<float>(mean_scale());
  for (float& value : values) value *= scale;
  return values;
}

bool Fsdp::is_unused(const Parameter& p) const {
  require(phase_ == Phase::kFinished && options().unused_parameters == UnusedParameters::kSkip,
          "[fsdp] expected is_unused() between finish_step() and the optimizer, and "
          "UnusedParameters::kSkip ({})",
          p.name);
  const Location at = location_of(p);
  return !at.flat.unused.empty() && at.flat.unused[at.index] != 0;
}

void Fsdp::load(const Parameter& p, std::span<const float> values) {
  const Location at = location_of(p);
  CutValues(*this).load(at, at.flat.master, values);
}

void Fsdp::load_owned(const Parameter& p, const ReadElements& read) {
  std::vector<float> values;
  CutValues(*this).load_master(location_of(p), [&](Range elements) {
    values.resize(static_cast<std::size_t>(elements.numel));
    read(elements, values);
    return std::span<const float>(values);
  });
}

void Fsdp::load_from(int root, const Parameter& p, std::span<const float> values) {
  CutValues(*this).check_at_rest("load_from");
  const Tensor whole =
      Tensor::empty(context_.memory, p.shape, DType::kF32, p.name, Category::kWorkspace);
  if (group_.rank() == root) {
    CutValues::check_numel(p, values);
    copy_from_floats(whole, values);
  }
  broadcast({whole}, root);
  compute_.synchronize();
  if (compute_.device().is_cuda()) group_.check();
  load(p, engine::to_vector<float>(whole));
}

void Fsdp::check_not_held(std::string_view caller) const {
  require(holder_.empty(), "[fsdp] expected {} after the end of {}, got it inside", caller,
          holder_);
}

void Fsdp::broadcast(const std::vector<Tensor>& buffers, int root) {
  within(compute_, [&] {
    for (const Tensor& buffer : buffers)
      group_.broadcast(buffer, root, context_.gather, buffer.name());
  });
}

void Fsdp::within(const Stream& stream, const std::function<void()>& enqueue) {
  context_.gather.wait(stream.record("computed"));
  try {
    enqueue();
  } catch (...) {
    // One that was enqueued before may still write a tensor that its owner frees now.
    context_.gather.synchronize_quietly();
    throw;
  }
  stream.wait(context_.gather.record("sent"));
}

std::vector<Tensor> Fsdp::buffers() const {
  std::vector<Tensor> all;
  for (const auto& unit : units_) {
    for (const engine::Block* block : unit->blocks()) {
      all.insert(all.end(), block->buffers.begin(), block->buffers.end());
    }
  }
  return all;
}

void Fsdp::broadcast_buffers(int root) {
  const std::vector<Tensor> all = options().broadcast_buffers ? buffers() : std::vector<Tensor>();
  if (!all.empty()) broadcast(all, root);
}

}  // namespace tessera::shard
