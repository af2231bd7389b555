// Updates of what a step has a gradient for, after it or during its last backward, and what renews
// the copies that are computed with.
#include <exception>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "shard/cut_values.h"
#include "shard/fsdp.h"

namespace tessera::shard {

using engine::require;

void Fsdp::take_gradients(std::string_view update, bool skips) {
  require(phase_ == Phase::kFinished,
          "[optimizer] expected begin_step(), backward and finish_step() before each step()");
  check_can_train("an update");
  wait_for_readers();
  group_.declare(update);
  schedule_.close_visits(compute_);
  if (skips && unsettled_) unsettled_->norm.reset();
  phase_ = Phase::kIdle;
}

// Updates of what is offloaded too begin after work of compute: see UpdateParts.
void Fsdp::wait_for_readers() {
  for (const engine::Event& read : values_read_) compute_.wait(read);
  values_read_.clear();
}

// [Note: early updates]
// A unit whose gradient is final in the last micro-step has no use left, unless a region that is
// still to be recomputed uses what is frozen of it, or uses it without gradient. After the
// reduction, and after the last such use, a stream of its own may update it while backward goes
// on. Peers read the unit's part no more: its last gather is complete, here and so everywhere. The
// root, and what that backward does not reach, follow in finish_step(), after all gathers, as some
// of these may be for nobody; finish_step() waits for all updates. The order is that of the
// reductions and replays, so it is the same on all ranks. Elements are updated with the same
// numbers as at the end, so bits are too; but the norm of the gradient comes too late to clip it,
// or to skip what is not finite.

void Fsdp::take_gradients_early(std::string_view update, EarlyUpdate early) {
  require(phase_ != Phase::kStep && !early_,
          "[optimizer] expected one step_in_backward() before begin_step(), got {}",
          early_ ? "two" : "it inside a step");
  require(
      phase_ != Phase::kFinished,
      "[optimizer] expected step() or cancel_step() for the gradient of the last step before the "
      "step_in_backward() of the next, got neither");
  require(context_.options.non_finite == NonFinite::kThrow,
          "[optimizer] expected NonFinite::kThrow for a step_in_backward(), got kSkip: what is not "
          "finite is known after it");
  require(
      context_.options.unused_parameters == UnusedParameters::kZero,
      "[optimizer] expected unused parameters to have the gradient zero in a step_in_backward(), "
      "got UnusedParameters::kSkip: what is unused is known after it");
  wait_for_readers();
  group_.declare(update);
  early_ = Early{.update = std::move(early)};
  schedule_.on_final([this](Unit& unit) { update_early(unit); });
  if (update_) return;
  update_ = compute_.sibling("optimizer", context_.options.stream_options(2));
}

void Fsdp::end_updates(const Optimizer& owner) noexcept {
  if (!early_ && context_.offload == nullptr) return;
  if (early_ && early_->update.owner == &owner) {
    schedule_.on_final(nullptr);
    early_.reset();
  }
  if (std::uncaught_exceptions() > num_exceptions_) {
    group_.abort("another error ended the training loop");
  }
  if (update_) update_->synchronize_quietly();
  if (context_.offload != nullptr) context_.offload->synchronize_quietly();
}

void Fsdp::update_early(Unit& unit) {
  unit.reshard(compute_);  // the slot need not wait for the update
  if (early_->updated.empty()) {
    wait_for_readers();  // who came after step_in_backward()
    settle_mean();
    early_->update.begin();
    update_->wait(compute_.record("prepared"));
  }
  early_->updated.insert(&unit);
  unit.forbid_use();
  update_->wait(compute_.record("last_use"));
  unit.wait_for_gather(*update_);
  unit.wait_for_sums(*update_);
  early_->update.update_unit(unit, *update_);
}

std::vector<Unit*> Fsdp::update_order() const {
  std::vector<Unit*> order;
  for (const auto& unit : units_)
    order.insert(unit->is_root() ? order.begin() : order.end(), unit.get());
  return order;
}

// Those that are left as in a step of its own.
void Fsdp::finish_early_update() {
  schedule_.close_visits(compute_);
  if (context_.options.placement.parameters != Place::kWhole) {
    compute_.wait(context_.gather.record("gathered"));
  }
  if (early_->updated.empty()) {
    wait_for_readers();
    early_->update.begin();
  }
  for (Unit* unit : update_order()) {
    if (early_->updated.contains(unit)) continue;
    if (updates_on_host()) early_->updated.insert(unit);  // and gathered with the others
    early_->update.update_unit(*unit, compute_);
  }
  for (const auto& unit : units_) {
    if (gathers_later(*unit) && !updates_on_host()) unit->gather_renewed();
  }
  compute_.wait(update_->record("updated"));
  if (!updates_on_host()) early_->update.end();
}

// Whether finish_step() gathers what an update during backward renewed. Gathers that wait for the
// host would hold up those of backward, and of the norm.
bool Fsdp::gathers_later(const Unit& unit) const {
  return early_ && early_->updated.contains(&unit) &&
         (updates_on_host() || early_->update.gathers == UpdateGathers::kContiguous);
}

bool Fsdp::updates_on_host() const { return context_.options.offload.optimizer > 0; }

void Fsdp::updated(Unit& unit, const engine::Stream& stream,
                   const std::vector<WrittenOnHost>& on_host) {
  unit.renew(stream, on_host);
  if (!gathers_later(unit)) gather_updated(unit);
}

void Fsdp::gather_updated(Unit& unit) {
  unit.gather_renewed();
  if (unit.is_root() && !compute_.is_capturing()) unit.unshard(compute_, "forward");
}

void Fsdp::parameters_changed() {
  CutValues(*this).check_at_rest("parameters_changed");
  if (context_.offload != nullptr) context_.offload->synchronize();
  for (const auto& unit : units_) {
    unit->renew_all(compute_);
    unit->gather_renewed();
  }
  schedule_.gather_kept(compute_);
}

}  // namespace tessera::shard
