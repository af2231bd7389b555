// Parameters that are frozen, or set free, between steps.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "shard/cut_values.h"
#include "shard/fsdp.h"
#include "shard/plan.h"

namespace tessera::shard {

using engine::Parameter;
using engine::require;

void Fsdp::trainable_changed() {
  CutValues(*this).check_at_rest("trainable_changed");
  check_can_train("trainable_changed()");
  require(phase_ == Phase::kIdle && !early_,
          "[trainable_changed] expected the update of the last step before, and no "
          "step_in_backward(), got {}",
          early_ ? "step_in_backward()" : "gradients that wait");
  require(!joined_ || joined_->total == 0,
          "[trainable_changed] expected it before join(), got it between join() and its step");
  for (const auto& unit : units_) {
    require(unit->reducer() == nullptr || !unit->reducer()->remembers(),
            "[trainable_changed] expected no communication hook that remembers earlier steps, got "
            "one: what it owes would be lost ({})",
            unit->name());
  }
  std::vector<std::string> lines;
  for (const Parameter* p : parameters()) {
    lines.push_back(fmt::format("{} is {}", p->name, p->trainable ? "trainable" : "frozen"));
  }
  agree(group_, context_.memory, compute_, lines);
  settle_step();  // the hooks that are told of it go
  for (const auto& unit : units_) unit->reshard(compute_);
  for (const engine::Stream* stream : {&context_.gather, &context_.reduce, &compute_}) {
    stream->synchronize();
  }
  if (context_.offload != nullptr) context_.offload->synchronize();
  for (const engine::Event& read : values_read_) read.wait();  // memory may go
  values_read_.clear();
  schedule_.forget_calls();
  phase_ = Phase::kBroken;  // until all is made again
  for (const auto& unit : units_) unit->tear_down();
  rings_.clear();
  sum_slots_.clear();
  for (const auto& unit : units_) {
    if (unit->is_cut_otherwise()) recut(*unit);
  }
  create_checks();
  plan_ = describe(context_.options, context_.mesh, units_);
  create_rings();
  phase_ = Phase::kIdle;
  parameters_changed();
}

// Values and states pass through the host, one unit at a time.
void Fsdp::recut(Unit& unit) {
  std::vector<std::pair<const Parameter*, std::vector<float>>> values;
  for (const Flat& flat : unit.flats()) {
    for (const Parameter* p : flat.parameters) values.emplace_back(p, full_parameter(*p));
  }
  for (FlatUser* user : users_) user->before_recut(unit);
  unit.recut();
  for (const auto& [p, all] : values) {
    const Location at = location_of(*p);
    CutValues(*this).write(at, at.flat.master, CutValues::part_of(*p, all));
  }
  for (FlatUser* user : users_) user->after_recut(unit);
}

}  // namespace tessera::shard
