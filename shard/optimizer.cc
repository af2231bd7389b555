#include "shard/optimizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

#include "engine/copy.h"
#include "engine/error.h"

namespace tessera::shard {

using engine::Category;
using engine::Parameter;
using engine::require;
using engine::Stream;
using engine::Tensor;

namespace {

// Which group each listed parameter is in.
std::map<std::string, std::size_t> listed(const std::vector<ParameterGroup>& groups) {
  require(groups.size() <= kMaxGroups, "[optimizer] expected at most {} groups, got {}", kMaxGroups,
          groups.size());
  std::map<std::string, std::size_t> group_of;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t other = 0; other < g; ++other) {
      require(groups[other].name != groups[g].name,
              "[optimizer] expected groups of different names, got two '{}'", groups[g].name);
    }
    for (const std::string& name : groups[g].parameters) {
      const auto [it, is_new] = group_of.emplace(name, g);
      require(is_new, "[optimizer] expected each parameter in one group, got '{}' in '{}' and '{}'",
              name, groups[it->second].name, groups[g].name);
    }
  }
  return group_of;
}

}  // namespace

Optimizer::Optimizer(Fsdp& fsdp, std::vector<std::string> state_names,
                     std::vector<ParameterGroup> groups,
                     const std::function<std::size_t(const Parameter&)>& default_group)
    : fsdp_(fsdp), state_names_(std::move(state_names)), groups_(std::move(groups)) {
  std::map<std::string, std::size_t> group_of = listed(groups_);
  const bool is_cuda = fsdp.compute().device().is_cuda();
  for (const auto& unit : fsdp.units()) {
    for (const Flat& flat : unit->flats()) {
      if (!flat.trainable) continue;
      Slot slot{.unit = unit.get(),
                .flat = &flat,
                .states = {},
                .groups = {},
                .step_groups = {},
                .groups_on_gpu = {}};
      for (const std::string& name : state_names_) {
        slot.states.push_back(Tensor::zeros(fsdp.memory(), flat.master.shape(), engine::DType::kF32,
                                            unit->name() + "." + name, Category::kOptimizer));
      }
      for (const Parameter* p : flat.parameters) {
        const auto it = group_of.find(p->name);
        const std::size_t group = it == group_of.end() ? default_group(*p) : it->second;
        slot.groups.push_back(static_cast<std::int32_t>(group));
        if (it != group_of.end()) group_of.erase(it);
      }
      slot.step_groups = slot.groups;
      if (is_cuda) {
        slot.groups_on_gpu = Tensor::from<std::int32_t>(
            fsdp.memory(), {static_cast<std::int64_t>(slot.groups.size())}, slot.groups,
            unit->name() + ".groups", Category::kOptimizer);
      }
      slots_.push_back(std::move(slot));
    }
  }
  require(group_of.empty(), "[optimizer] expected trainable parameters, got '{}' (group '{}')",
          group_of.empty() ? "" : group_of.begin()->first,
          group_of.empty() ? "" : groups_[group_of.begin()->second].name);
  if (!is_cuda) return;
  num_steps_on_gpu_ = Tensor::zeros(fsdp.memory(), {1}, engine::DType::kI32, "optimizer.num_steps",
                                    Category::kOptimizer);
}

// The step
// -----------------------------------------------------------------------------------------

void Optimizer::step(double lr, const GradNorm& norm, double max_norm) {
  begin_step(lr, norm, max_norm);
  step_units();
}

void Optimizer::step(double lr, ClipFactor clip) {
  begin_step(lr, clip);
  step_units();
}

// The root first: the next forward needs it first, so its gather runs beside the other updates.
void Optimizer::step_units() {
  for (const bool root : {true, false}) {
    for (const auto& unit : fsdp_.units()) {
      if (unit->is_root() == root) step_unit(*unit, fsdp_.compute());
    }
  }
  end_step();
}

void Optimizer::begin_step(double lr, const GradNorm& norm, double max_norm) {
  if (fsdp_.compute().device().is_cuda()) {
    begin_step(Step{.lr = lr, .norm = norm.on_device(), .max_norm = max_norm});
  } else if (norm.not_finite().empty()) {
    begin_step(Step{.lr = lr, .clip = clip_scale(norm.value(), max_norm)});
  } else {
    begin_step(Step{.lr = lr, .skips = true});
  }
}

void Optimizer::begin_step(double lr, ClipFactor clip) {
  begin_step(Step{.lr = lr, .clip = clip.value});
}

void Optimizer::begin_step(Step step) {
  fsdp_.take_gradients(describe(step));
  prepare_step(step);
}

void Optimizer::step_in_backward(double lr, UpdateGathers gathers) {
  const Step step{.lr = lr};
  fsdp_.take_gradients_early(
      describe(step) + ", in backward",
      {.gathers = gathers,
       .begin = [this, step] { prepare_step(step); },
       .update_unit = [this](Unit& unit, const Stream& stream) { step_unit(unit, stream); },
       .end = [this] { end_step(); }});
}

void Optimizer::prepare_step(Step step) {
  for (Slot& slot : slots_) slot.is_updated = false;
  skips_ = step.skips;
  if (skips_) return;
  step.mean_scale = fsdp_.mean_scale();
  step.num_steps = ++num_steps_;
  step.num_steps_on_gpu = num_steps_on_gpu_;
  prepare(step);
}

// What must be the same on every rank, as each updates a part.
std::string Optimizer::describe(const Step& step) const {
  std::string text = fmt::format("optimizer step {}, lr {}, clip {}, max_norm {}", num_steps_ + 1,
                                 step.lr, step.clip, step.max_norm);
  for (const ParameterGroup& group : groups_) {
    text += fmt::format(", '{}' lr x {} decay {}", group.name, group.lr_scale, group.weight_decay);
  }
  return text;
}

void Optimizer::leave_unused(Slot& slot) {
  const std::vector<std::uint8_t>& unused = slot.flat->unused;
  if (unused.empty()) return;
  std::vector<std::int32_t> groups = slot.groups;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (unused[i] != 0) groups[i] = -1;
  }
  if (groups == slot.step_groups) return;
  slot.step_groups = std::move(groups);
  if (!slot.groups_on_gpu.defined()) return;
  slot.groups_on_gpu.copy_from_host(slot.step_groups.data(),
                                    static_cast<std::int64_t>(slot.step_groups.size()));
}

void Optimizer::step_unit(Unit& unit, const Stream& stream) {
  for (Slot& slot : slots_) {
    if (slot.unit != &unit) continue;
    require(!slot.is_updated, "[optimizer] expected one step_unit() in a step, got two ('{}')",
            unit.name());
    slot.is_updated = true;
    if (skips_) continue;
    leave_unused(slot);
    update({*slot.flat, unit.name(), slot.states, slot.step_groups, slot.groups_on_gpu}, stream);
    fsdp_.updated(unit, stream);
  }
}

void Optimizer::end_step() {
  for (const Slot& slot : slots_) {
    require(slot.is_updated,
            "[optimizer] expected step_unit() of every unit before end_step(), "
            "got none of '{}'",
            slot.unit->name());
  }
  fsdp_.prefetch_forward();
}

// Groups and states
// -----------------------------------------------------------------------------------

ParameterGroup& Optimizer::group(std::string_view name) {
  const auto it = std::ranges::find(groups_, name, &ParameterGroup::name);
  std::vector<std::string_view> names;
  for (const ParameterGroup& group : groups_) names.push_back(group.name);
  require(it != groups_.end(), "[optimizer] expected one of the groups {}, got '{}'",
          fmt::join(names, ", "), name);
  return *it;
}

const Tensor& Optimizer::state(const Fsdp::Location& at, std::string_view name) const {
  const auto index = std::ranges::find(state_names_, name) - state_names_.begin();
  require(static_cast<std::size_t>(index) < state_names_.size(),
          "[optimizer] expected one of the states {}, got '{}'", fmt::join(state_names_, ", "),
          name);
  const auto slot = std::ranges::find(slots_, &at.flat, &Slot::flat);
  require(slot != slots_.end(), "[optimizer] expected a trainable parameter, got a frozen one ({})",
          at.flat.parameters[at.index]->name);
  return slot->states[static_cast<std::size_t>(index)];
}

std::vector<float> Optimizer::full_state(const Parameter& p, std::string_view name) {
  const Fsdp::Location at = fsdp_.location_of(p);
  return fsdp_.full(at, state(at, name));
}

void Optimizer::load_state(const Parameter& p, std::string_view name,
                           std::span<const float> values) {
  const Fsdp::Location at = fsdp_.location_of(p);
  fsdp_.load(at, state(at, name), values);
}

std::int64_t Optimizer::num_steps() const {
  if (!num_steps_on_gpu_.defined()) return num_steps_;
  return engine::to_vector<std::int32_t>(num_steps_on_gpu_).front();
}

void Optimizer::set_num_steps(std::int64_t num_steps) {
  require(num_steps >= 0 && num_steps <= std::numeric_limits<std::int32_t>::max(),
          "[optimizer] expected a number of steps, got {}", num_steps);
  num_steps_ = num_steps;
  if (!num_steps_on_gpu_.defined()) return;
  const auto count = static_cast<std::int32_t>(num_steps);
  num_steps_on_gpu_.copy_from_host(&count, 1);
}

}  // namespace tessera::shard
