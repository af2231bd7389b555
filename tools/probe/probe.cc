#include "tools/probe/probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"

namespace tessera::tools {

using engine::DType;
using engine::Tensor;
using shard::Flat;
using shard::SplitTensor;
using shard::Unit;

namespace {

bool is_float(const Tensor& t) { return t.dtype() == DType::kF32 || t.dtype() == DType::kBF16; }

void append(std::vector<float>& values, const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return;
  const std::size_t at = values.size();
  values.resize(at + static_cast<std::size_t>(t.numel()));
  engine::dispatch_float(t.dtype(), "probe", [&](auto zero) {
    const auto stored = engine::to_vector<decltype(zero)>(t);
    engine::cast(values.data() + at, stored.data(), t.numel());
  });
}

}  // namespace

void Probe::begin_step(std::int64_t step) {
  step_ = options_.first_step <= step && step <= options_.last_step ? step : 0;
  parts_.clear();
}

void Probe::begin_micro_step(std::int64_t micro) {
  micro_batch_ = micro * options_.num_ranks + options_.rank + 1;
  order_ = 0;
  visits_.clear();
}

void Probe::end_step() {
  if (step_ != 0) sink_(step_, std::move(parts_));
  step_ = 0;
  parts_.clear();
}

void Probe::on_output(const engine::Block& block, std::size_t index, const Tensor& output,
                      std::string_view phase) {
  if (phase != "forward" || !is_float(output)) return;
  const std::string name = index == 0 ? "output" : fmt::format("output {}", index + 1);
  take_whole(ProbePhase::kOutput, fmt::format("{}.{}", block.name, name), block.name, output);
}

void Probe::on_output_gradient(const engine::Block& block, std::size_t index,
                               const Tensor& gradient) {
  if (!is_float(gradient)) return;
  const std::string name = index == 0 ? "output" : fmt::format("output {}", index + 1);
  take_whole(ProbePhase::kOutputGradient, fmt::format("{}.{}", block.name, name), block.name,
             gradient);
}

void Probe::on_gathered(const Unit& unit, std::string_view why) {
  const ProbePhase phase =
      why == "forward" ? ProbePhase::kGatheredForward : ProbePhase::kGatheredBackward;
  for (const Flat& flat : unit.flats()) {
    for (const engine::Parameter* p : flat.parameters) {
      take_whole(phase, p->name, unit.name(), p->value);
    }
  }
}

void Probe::on_gradient(const Unit& unit) {
  for (const Flat& flat : unit.flats()) {
    if (!flat.trainable) continue;
    for (const engine::Parameter* p : flat.parameters) {
      take_whole(ProbePhase::kGradient, p->name, unit.name(), p->grad);
    }
  }
}

void Probe::on_reduced(const shard::Fsdp& fsdp) {
  micro_batch_ = order_ = 0;
  if (step_ == 0) return;
  fsdp.synchronize();  // what of the sums lies on the host
  for (const auto& unit : fsdp.units()) {
    for (const Flat& flat : unit->flats()) {
      if (flat.trainable) take_owned(ProbePhase::kReduced, "", *unit, flat, flat.grad_sum);
    }
  }
}

void Probe::on_updated(const shard::Fsdp& fsdp, const shard::Optimizer& optimizer) {
  micro_batch_ = order_ = 0;
  if (step_ == 0) return;
  fsdp.synchronize();
  for (const auto& unit : fsdp.units()) {
    for (const Flat& flat : unit->flats()) {
      take_owned(ProbePhase::kUpdated, "", *unit, flat, flat.master);
    }
  }
  order_ = 0;
  for (const std::string& name : optimizer.state_names()) {
    for (const auto& unit : fsdp.units()) {
      for (const Flat& flat : unit->flats()) {
        if (!flat.trainable) continue;
        take_owned(ProbePhase::kState, name + " of ", *unit, flat,
                   optimizer.state({flat, 0}, name));
      }
    }
  }
}

ProbePart Probe::part_of(ProbePhase phase, const std::string& tensor, const std::string& unit,
                         const engine::Shape& shape, DType dtype) const {
  ProbePart part;
  part.key.step = step_;
  part.key.micro_batch = micro_batch_;
  part.key.phase = phase;
  part.key.tensor = tensor;
  part.unit = unit;
  part.rank = options_.rank;
  part.shape.assign(shape.dims().begin(), shape.dims().end());
  part.dtype = name_of(dtype);
  return part;
}

// Whole on this rank, for the micro-batch at work.
void Probe::take_whole(ProbePhase phase, const std::string& name, const std::string& unit,
                       const Tensor& tensor) {
  if (step_ == 0 || micro_batch_ == 0) return;
  ProbePart part = part_of(phase, name, unit, tensor.shape(), tensor.dtype());
  part.key.visit = ++visits_[{phase, name}];
  part.order = ++order_;
  if (!wants(part.key)) return;
  std::vector<float> values;
  append(values, tensor);
  add(std::move(part), values);
}

// What this rank owns of each parameter of `flat`, of a tensor laid out like Flat::master.
void Probe::take_owned(ProbePhase phase, const std::string& prefix, const Unit& unit,
                       const Flat& flat, const SplitTensor& tensor) {
  const std::int64_t first = order_;
  order_ += static_cast<std::int64_t>(flat.parameters.size());
  std::vector<float> values;
  for (const shard::Segment& s : flat.segments) {
    const engine::Parameter& p = *flat.parameters[s.parameter];
    ProbePart part =
        part_of(phase, fmt::format("{}{}", prefix, p.name), unit.name(), p.shape, tensor.dtype());
    part.order = first + static_cast<std::int64_t>(s.parameter) + 1;
    part.begin = s.parameter_begin;
    if (!wants(part.key)) continue;
    if (values.empty()) {
      append(values, tensor.device());
      append(values, tensor.host());
    }
    add(std::move(part), std::span(values).subspan(static_cast<std::size_t>(s.shard_begin),
                                                   static_cast<std::size_t>(s.numel)));
  }
}

bool Probe::wants(const ProbeKey& key) const {
  if (!options_.target) return true;
  ProbeKey target = *options_.target;
  target.step = key.step;
  return target == key;
}

void Probe::add(ProbePart part, std::span<const float> values) {
  part.checksum = checksum_of(values, part.begin);
  if (options_.target) part.values.assign(values.begin(), values.end());
  parts_.push_back(std::move(part));
}

}  // namespace tessera::tools
