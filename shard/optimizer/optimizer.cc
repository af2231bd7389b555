#include "shard/optimizer/optimizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "shard/cut_values.h"

namespace tessera::shard {

using engine::Category;
using engine::Parameter;
using engine::require;
using engine::Stream;
using engine::Tensor;

namespace {

// Which group each listed parameter is in.
std::map<std::string, std::size_t> listed(const std::vector<ParameterGroup>& groups) {
  require(groups.size() <= kMaxGroups, "[optimizer] expected at most {} groups, got {} ('{}')",
          kMaxGroups, groups.size(), groups.empty() ? "" : groups.back().name);
  std::map<std::string, std::size_t> group_of;
  std::set<std::string_view> names;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    require(names.insert(groups[g].name).second,
            "[optimizer] expected groups of different names, got two '{}'", groups[g].name);
    for (const std::string& name : groups[g].parameters) {
      const auto [it, is_new] = group_of.emplace(name, g);
      require(is_new, "[optimizer] expected each parameter in one group, got '{}' in '{}' and '{}'",
              name, groups[it->second].name, groups[g].name);
    }
  }
  return group_of;
}

void fill_zero(const SplitTensor& t) {
  for (const Tensor* part : {&t.device(), &t.host()}) {
    if (!part->defined()) continue;
    part->buffer()->memory().fill(part->raw(), 0, part->nbytes());
  }
}

}  // namespace

Optimizer::Optimizer(Fsdp& fsdp, OptimizerTraits traits)
    : fsdp_(fsdp), traits_(std::move(traits)), group_of_(listed(traits_.groups)) {
  require(traits_.is_elementwise || !fsdp.options().offload.any(),
          "[optimizer] expected nothing offloaded with '{}', which does not update element by "
          "element",
          traits_.name);
  for (const auto& unit : fsdp.units()) create_slots(*unit);
  std::map<std::string, std::size_t> unknown = group_of_;
  for (const Parameter* p : fsdp.parameters()) unknown.erase(p->name);
  require(unknown.empty(), "[optimizer] expected wrapped parameters, got '{}' (group '{}')",
          unknown.empty() ? "" : unknown.begin()->first,
          unknown.empty() ? "" : groups()[unknown.begin()->second].name);
  for (const Parameter* p : fsdp.parameters()) {
    const auto listed_in = group_of_.find(p->name);
    require(listed_in == group_of_.end() || updates(*p),
            "[optimizer] expected groups of parameters that it updates, got '{}' (group '{}')",
            p->name, listed_in == group_of_.end() ? "" : groups()[listed_in->second].name);
  }
  fsdp.add_user(*this);
}

Optimizer::~Optimizer() {
  end_updates();
  fsdp_.remove_user(*this);
}

void Optimizer::create_slots(const Unit& unit) {
  const Flat* flat = unit.trainable();
  if (flat == nullptr) return;
  Slot slot{.unit = &unit,
            .flat = flat,
            .states = {},
            .groups = {},
            .step_groups = {},
            .groups_on_gpu = {}};
  for (const Parameter* p : flat->parameters) {
    const auto it = group_of_.find(p->name);
    const std::size_t group = it != group_of_.end()   ? it->second
                              : traits_.default_group ? traits_.default_group(*p)
                                                      : 0;
    slot.groups.push_back(updates(*p) ? static_cast<std::int32_t>(group) : -1);
  }
  for (const std::string& name : state_names()) {
    if (is_idle(slot)) break;
    slot.states.push_back(SplitTensor::empty(fsdp_.memory(), fsdp_.host_memory(), flat->owned.numel,
                                             fsdp_.options().offload.optimizer, engine::DType::kF32,
                                             unit.name() + "." + name, Category::kOptimizer));
    fill_zero(slot.states.back());
  }
  slot.step_groups = std::make_shared<std::vector<std::int32_t>>(slot.groups);
  if (fsdp_.compute().device().is_cuda()) {
    slot.groups_on_gpu =
        Tensor::from<std::int32_t>(fsdp_.memory(), {static_cast<std::int64_t>(slot.groups.size())},
                                   slot.groups, unit.name() + ".groups", Category::kOptimizer);
  }
  slots_.push_back(std::move(slot));
}

// Whether another optimizer updates all of it.
bool Optimizer::is_idle(const Slot& slot) {
  return std::ranges::all_of(slot.groups, [](std::int32_t group) { return group < 0; });
}

void Optimizer::before_recut(const Unit& unit) {
  for (const Slot& slot : slots_) {
    if (slot.unit != &unit) continue;
    for (std::size_t i = 0; i < slot.flat->parameters.size(); ++i) {
      const Parameter* p = slot.flat->parameters[i];
      if (!p->trainable || slot.groups[i] < 0) continue;
      for (const SplitTensor& state : slot.states) {
        kept_[p].push_back(CutValues(fsdp_).full({*slot.flat, i}, state));
      }
    }
  }
  std::erase_if(slots_, [&](const Slot& slot) { return slot.unit == &unit; });
}

void Optimizer::after_recut(const Unit& unit) {
  create_slots(unit);
  for (const auto& [p, states] : kept_) {
    for (std::size_t i = 0; i < states.size(); ++i) load_state(*p, state_names()[i], states[i]);
  }
  kept_.clear();
}

// The step
// -----------------------------------------------------------------------------------------

void Optimizer::step(double lr, const GradNorm& norm, double max_norm) {
  begin_step(lr, norm, max_norm);
  step_units();
}

void Optimizer::step(double lr, const JointNorm& norm, double max_norm) {
  begin_step(lr, norm, max_norm);
  step_units();
}

void Optimizer::step(double lr, ClipFactor clip) {
  begin_step(lr, clip);
  step_units();
}

void Optimizer::step_units() {
  for (Unit* unit : fsdp_.update_order()) step_unit(*unit, fsdp_.compute());
  end_step();
}

namespace {

void check_max_norm(double max_norm) {
  require(max_norm >= 0, "[optimizer] expected a max_norm of at least 0, got {} (0: no clipping)",
          max_norm);
}

}  // namespace

Optimizer::Step Optimizer::step_of(double lr, const GradNorm& norm, double max_norm) const {
  check_max_norm(max_norm);
  check_can_capture();
  if (fsdp_.compute().device().is_cuda() && traits_.is_elementwise) {
    return {.lr = lr, .norm = norm, .max_norm = max_norm};
  }
  if (fsdp_.compute().device().is_meta) return {.lr = lr};
  if (!norm.not_finite().empty()) return {.lr = lr, .skips = true};
  return {.lr = lr, .clip = clip_scale(norm.value(), max_norm)};
}

Optimizer::Step Optimizer::step_of(double lr, const JointNorm& norm, double max_norm) {
  check_max_norm(max_norm);
  if (!norm.not_finite().empty()) return {.lr = lr, .skips = true};
  return {.lr = lr, .clip = clip_scale(norm.value(), max_norm)};
}

void Optimizer::begin_step(double lr, const GradNorm& norm, double max_norm) {
  begin_step(step_of(lr, norm, max_norm));
}

void Optimizer::begin_step(double lr, const JointNorm& norm, double max_norm) {
  begin_step(step_of(lr, norm, max_norm));
}

void Optimizer::begin_step(double lr, ClipFactor clip) {
  begin_step(Step{.lr = lr, .clip = clip.value});
}

void Optimizer::check_can_capture() const {
  require(traits_.is_elementwise || !fsdp_.compute().is_capturing(),
          "[optimizer] expected no capture of a step by '{}', which does not update element by "
          "element",
          traits_.name);
}

// Whoever leaves some to another optimizer would step without it.
void Optimizer::check_updates_all() const {
  for (const Slot& slot : slots_) {
    const auto left = std::ranges::find_if(slot.groups, [](std::int32_t g) { return g < 0; });
    if (left == slot.groups.end()) continue;
    engine::fail(
        "[optimizer] expected step_together() for an optimizer that leaves parameters to another, "
        "got a step of its own ({})",
        slot.flat->parameters[static_cast<std::size_t>(left - slot.groups.begin())]->name);
  }
}

void Optimizer::begin_step(Step step) {
  check_can_capture();
  check_updates_all();
  fsdp_.take_gradients(describe(step), step.skips);
  prepare_step(step);
}

void Optimizer::step_in_backward(double lr, UpdateGathers gathers) {
  require(traits_.is_elementwise,
          "[optimizer] expected step() with '{}', which does not update element by element, got "
          "step_in_backward(): what it gathers would hold backward up",
          traits_.name);
  check_updates_all();
  const Step step{.lr = lr};
  fsdp_.take_gradients_early(
      describe(step) + ", in backward",
      {.owner = this,
       .gathers = gathers,
       .begin = [this, step] { prepare_step(step); },
       .update_unit = [this](Unit& unit, const Stream& stream) { step_unit(unit, stream); },
       .end = [this] { end_step(); }});
}

void Optimizer::prepare_step(Step step) {
  for (Slot& slot : slots_) slot.is_updated = false;
  step_ = std::move(step);
  if (step_.skips) return;
  step_.groups = group_rates();
  step_.mean_scale = fsdp_.mean_scale();
  step_.is_captured = fsdp_.compute().is_capturing();
  step_.num_steps = num_steps_ + 1;
  if (!step_.is_captured) num_steps_ = step_.num_steps;  // else each launch counts
  prepare(step_);
}

void Optimizer::repeat_step(double lr) {
  set_rates(lr);
  ++num_steps_;
}

void Optimizer::set_rates(double) {
  engine::fail("[optimizer] expected one that reads its rates on the device in a captured step");
}

std::shared_ptr<const std::vector<GroupRates>> Optimizer::group_rates() {
  const auto has = [](const GroupRates& rates, const ParameterGroup& group) {
    return rates == GroupRates{group.lr_scale, group.weight_decay};
  };
  if (group_rates_ != nullptr && std::ranges::equal(*group_rates_, groups(), has)) {
    return group_rates_;
  }
  std::vector<GroupRates> rates;
  groups_text_.clear();
  for (const ParameterGroup& group : groups()) {
    rates.push_back({group.lr_scale, group.weight_decay});
    groups_text_ +=
        fmt::format(", '{}' lr x {} decay {}", group.name, group.lr_scale, group.weight_decay);
  }
  return group_rates_ = std::make_shared<const std::vector<GroupRates>>(std::move(rates));
}

// What must be the same on every rank, as each updates a part.
std::string Optimizer::describe(const Step& step) {
  group_rates();
  return fmt::format("optimizer step {}, lr {}, clip {}, max_norm {}{}{}", num_steps_ + 1, step.lr,
                     step.clip, step.max_norm, step.skips ? ", skipped" : "", groups_text_);
}

void Optimizer::leave_unused(Slot& slot) {
  const std::vector<std::uint8_t>& unused = slot.flat->unused;
  if (unused.empty()) return;
  std::vector<std::int32_t> groups = slot.groups;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (unused[i] != 0) groups[i] = -1;
  }
  if (groups == *slot.step_groups) return;
  slot.step_groups = std::make_shared<std::vector<std::int32_t>>(std::move(groups));
  if (!slot.groups_on_gpu.defined()) return;
  slot.groups_on_gpu.copy_from_host(slot.step_groups->data(),
                                    static_cast<std::int64_t>(slot.step_groups->size()));
}

void Optimizer::step_unit(Unit& unit, const Stream& stream) {
  update_slot(unit, stream, /*renews=*/true);
}

// Whether there was anything to update. `renews`: what is gathered or computed with, too.
bool Optimizer::update_slot(Unit& unit, const Stream& stream, bool renews) {
  const auto slot = std::ranges::find(slots_, &unit, &Slot::unit);
  if (slot == slots_.end()) return false;
  require(!slot->is_updated, "[optimizer] expected one step_unit() in a step, got two ('{}')",
          unit.name());
  slot->is_updated = true;
  if (step_.skips || is_idle(*slot)) return false;
  leave_unused(*slot);
  UnitUpdate update{.unit = unit,
                    .flat = *slot->flat,
                    .states = slot->states,
                    .step = step_,
                    .groups = slot->step_groups,
                    .groups_on_gpu = slot->groups_on_gpu,
                    .stream = stream};
  update_unit(update);
  if (renews) fsdp_.updated(unit, update.stream, update.on_host);
  return true;
}

namespace {

const GroupRates& rates_of(const std::vector<GroupRates>& rates, std::int32_t group) {
  return rates[static_cast<std::size_t>(group)];
}

}  // namespace

double Optimizer::UnitUpdate::lr(std::size_t i) const {
  return step.lr * rates_of(*step.groups, (*groups)[i]).lr_scale;
}

double Optimizer::UnitUpdate::weight_decay(std::size_t i) const {
  return rates_of(*step.groups, (*groups)[i]).weight_decay;
}

Tensor Optimizer::gather(const UnitUpdate& update, const SplitTensor& owned) const {
  return fsdp_.gather(update.flat, owned.device(), update.stream, update.unit.name() + " whole");
}

void Optimizer::end_step() {
  check_all_updated();
  step_ = {};
  fsdp_.prefetch_forward();
}

void Optimizer::check_all_updated() const {
  for (const Slot& slot : slots_) {
    require(slot.is_updated,
            "[optimizer] expected step_unit() of every unit before end_step(), "
            "got none of '{}'",
            slot.unit->name());
  }
}

// Groups and states
// -----------------------------------------------------------------------------------

ParameterGroup& Optimizer::group(std::string_view name) {
  std::vector<ParameterGroup>& groups = traits_.groups;
  const auto it = std::ranges::find(groups, name, &ParameterGroup::name);
  std::vector<std::string_view> names;
  for (const ParameterGroup& group : groups) names.push_back(group.name);
  require(it != groups.end(), "[optimizer] expected one of the groups {}, got '{}'",
          fmt::join(names, ", "), name);
  return *it;
}

const SplitTensor& Optimizer::state(const Location& at, std::string_view name) const {
  const std::vector<std::string>& names = state_names();
  const auto index = std::ranges::find(names, name) - names.begin();
  require(static_cast<std::size_t>(index) < names.size(),
          "[optimizer] expected one of the states {}, got '{}'", fmt::join(names, ", "), name);
  const auto slot = std::ranges::find(slots_, &at.flat, &Slot::flat);
  require(slot != slots_.end(), "[optimizer] expected a trainable parameter, got a frozen one ({})",
          at.flat.parameters[at.index]->name);
  require(!is_idle(*slot), "[optimizer] expected a parameter that it updates, got {}",
          at.flat.parameters[at.index]->name);
  return slot->states[static_cast<std::size_t>(index)];
}

std::vector<float> Optimizer::full_state(const Parameter& p, std::string_view name) {
  const Location at = fsdp_.location_of(p);
  require(updates(p), "[optimizer] expected a parameter that it updates, got {}", p.name);
  return CutValues(fsdp_).full(at, state(at, name));
}

void Optimizer::load_state(const Parameter& p, std::string_view name,
                           std::span<const float> values) {
  const Location at = fsdp_.location_of(p);
  require(updates(p), "[optimizer] expected a parameter that it updates, got {}", p.name);
  CutValues(fsdp_).load(at, state(at, name), values);
}

void Optimizer::set_num_steps(std::int64_t num_steps) {
  require(num_steps >= 0 && num_steps <= std::numeric_limits<std::int32_t>::max(),
          "[optimizer] expected a number of steps, got {}", num_steps);
  num_steps_ = num_steps;
}

}  // namespace tessera::shard
