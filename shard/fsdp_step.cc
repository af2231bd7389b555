// A step: its micro-steps, how it ends, and whether it counts.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/host_gather.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/fsdp.h"

namespace tessera::shard {

using engine::Parameter;
using engine::require;

namespace {

// Of one micro-step: sums of fewer than 2^22 of them are exact.
constexpr std::int64_t kMaxWeight = std::int64_t{1} << 40;

}  // namespace

void Fsdp::begin_step(int num_micro_steps, const MicroStep& first) {
  require(num_micro_steps >= 1, "[fsdp] expected at least 1 micro-step, got {}", num_micro_steps);
  check_whole("begin_step");
  require(phase_ != Phase::kStep,
          "[fsdp] expected finish_step() or cancel_step() before the next begin_step(), got a step "
          "of which {} of {} micro-steps have begun",
          micro_step_ + 1, num_micro_steps_);
  check_can_train("begin_step()");
  for (const auto& unit : units_) {
    for (const Flat& flat : unit->flats()) {
      for (const Parameter* p : flat.parameters) {
        require(p->trainable == flat.trainable,
                "[fsdp] expected trainable={} as when it was wrapped, or trainable_changed(), got "
                "{} ({})",
                flat.trainable, p->trainable, p->name);
      }
    }
  }
  require(!joined_ || joined_->total > 0,
          "[fsdp] expected no step after a join() that returned 0: no rank has a batch (rank {})",
          group_.rank());
  require(!joined_ || joined_->num_micro_steps == num_micro_steps,
          "[fsdp] expected the {} micro-steps that join() returned, got {} (rank {})",
          joined_ ? joined_->num_micro_steps : 0, num_micro_steps, group_.rank());
  schedule_.renew_stale(compute_);
  broadcast_buffers(joined_ ? joined_->first_rank : 0);
  settle_step();
  num_micro_steps_ = num_micro_steps;
  const int mean_ranks =
      context_.options.mean_ranks == 0 ? group_.size() : context_.options.mean_ranks;
  settle_mean();  // of a step that was given up
  mean_scale_ = 1 / static_cast<double>(joined_ ? joined_->total
                                                : std::int64_t{mean_ranks} * num_micro_steps);
  weight_.reset();
  micro_step_ = -1;
  for (const auto& unit : units_) unit->begin_step(compute_);
  if (context_.options.non_finite == NonFinite::kSkip &&
      std::ranges::any_of(units_, [](const auto& unit) {
        return unit->reducer() != nullptr && unit->reducer()->takes_back();
      })) {
    unsettled_ = Unsettled{};
  }
  if (context_.check != nullptr) context_.check->begin_step(compute_);
  if (context_.norm_words.defined()) {  // after what a step that was given up may still add
    context_.reduce.wait(compute_.record("norm read"));
    engine::launch_fill(context_.reduce, context_.norm_words, 0, "norm.clear");
  }
  begin_micro_step(first);
  phase_ = Phase::kStep;
}

void Fsdp::next_micro_step(const MicroStep& next) {
  require(phase_ == Phase::kStep, "[fsdp] expected begin_step() before next_micro_step()");
  require(micro_step_ + 1 < num_micro_steps_, "[fsdp] expected {} micro-steps, got one more",
          num_micro_steps_);
  end_micro_step();
  begin_micro_step(next);
}

void Fsdp::end_micro_step() {
  const bool has_batch = joined_ && micro_step_ < joined_->num_batches;
  require(!has_batch || schedule_.has_run_backward(),
          "[fsdp] expected a backward in micro-step {} of {}, for which join() was told that there "
          "is a batch, got none (rank {})",
          micro_step_ + 1, num_micro_steps_, group_.rank());
  schedule_.end_micro_step(compute_);
}

void Fsdp::begin_micro_step(const MicroStep& options) {
  const bool is_last = micro_step_ + 2 == num_micro_steps_;
  require(options.num_backwards >= 1, "[fsdp] expected at least 1 backward, got {}",
          options.num_backwards);
  require(!is_last || !options.no_sync,
          "[fsdp] expected the last micro-step to reduce gradients, got no_sync");
  check_weight(options);
  ++micro_step_;
  group_.declare(fmt::format("micro-step {} of {}, no_sync {}, {} backward{}{}", micro_step_ + 1,
                             num_micro_steps_, options.no_sync, options.num_backwards,
                             options.num_backwards == 1 ? "" : "s",
                             options.weight ? ", with a weight" : ""));
  if (options.weight) add_weight(*options.weight, is_last);
  if (context_.check != nullptr) context_.check->begin_micro_step(micro_step_);
  schedule_.begin_micro_step(options, is_last);
  if (joined_ && micro_step_ >= joined_->num_batches) schedule_.shadow(compute_);
}

void Fsdp::check_weight(const MicroStep& options) {
  require(micro_step_ < 0 || options.weight.has_value() == weight_.has_value(),
          "[fsdp] expected a weight in each micro-step of a step or in none, got {} in micro-step "
          "{} of {} (rank {})",
          options.weight ? "one" : "none", micro_step_ + 2, num_micro_steps_, group_.rank());
  if (!options.weight) return;
  require(*options.weight >= 0 && *options.weight < kMaxWeight,
          "[fsdp] expected a weight from 0 to 2^40, got {} (rank {})", *options.weight,
          group_.rank());
  require(context_.options.mean_ranks == 0,
          "[fsdp] expected no weight with mean_ranks, got {}: ranks of other groups are not asked",
          context_.options.mean_ranks);
  require(!compute_.is_capturing(),
          "[fsdp] expected no weight in a step that is captured: the host adds them up");
}

// All weights of this rank are known once the last micro-step begins. Those of others arrive while
// it works.
void Fsdp::add_weight(std::int64_t weight, bool is_last) {
  weight_ = weight_.value_or(0) + weight;
  if (!is_last) return;
  const std::vector<std::int64_t> mine{*weight_};
  const auto values = engine::Tensor::from<std::int64_t>(context_.memory, {1}, mine, "weight",
                                                         engine::Category::kCommunication);
  context_.gather.wait(compute_.record("weight"));
  weights_.emplace(group_, values, context_.gather, engine::Memory::pinned(context_.gather),
                   "weight");
}

void Fsdp::settle_mean() {
  if (!weights_) return;
  // On a meta device nothing has arrived, and no value is read.
  const std::vector<std::int64_t> all =
      compute_.device().is_meta ? std::vector{*weight_} : weights_->wait<std::int64_t>(compute_);
  weights_.reset();
  const std::int64_t total = std::accumulate(all.begin(), all.end(), std::int64_t{0});
  mean_scale_ = total == 0 ? 0 : 1 / static_cast<double>(total);
}

template <class T>
std::vector<T> Fsdp::gather_to_host(const std::vector<T>& values, std::string_view label) {
  context_.gather.wait(compute_.record(label));
  return comm::gather_to_host<T>(group_, values, context_.memory, context_.gather, label);
}

int Fsdp::join(int num_batches) {
  require(phase_ != Phase::kStep, "[fsdp] expected join() between steps, got it inside one");
  require(context_.options.mean_ranks == 0,
          "[fsdp] expected no join() with mean_ranks, got {}: ranks of other groups are not asked",
          context_.options.mean_ranks);
  require(num_batches >= 0, "[fsdp] expected a number of batches, got {} (rank {})", num_batches,
          group_.rank());
  const std::vector<std::int64_t> all = gather_to_host(
      std::vector<std::int64_t>{num_batches, schedule_.can_shadow() ? 1 : 0}, "join");
  Joined joined{.num_batches = num_batches};
  for (std::size_t i = 0; i < all.size(); i += 2) {
    joined.num_micro_steps = std::max(joined.num_micro_steps, static_cast<int>(all[i]));
    if (joined.total == 0) joined.first_rank = static_cast<int>(i / 2);
    joined.total += all[i];
  }
  for (std::size_t i = 0; i < all.size() && joined.total > 0; i += 2) {
    require(all[i] > 0 || all[i + 1] != 0,
            "[fsdp] expected a batch on every rank until each has completed a micro-step, got none "
            "on rank {}",
            i / 2);
  }
  if (joined.total == 0) broadcast_buffers(last_joined_);
  if (joined.total > 0) last_joined_ = joined.first_rank;
  joined_ = joined;
  return joined.num_micro_steps;
}

GradNorm Fsdp::finish_step() {
  require(phase_ == Phase::kStep, "[fsdp] expected begin_step() before finish_step()");
  require(micro_step_ + 1 == num_micro_steps_,
          "[fsdp] expected {} micro-steps before finish_step(), got {}", num_micro_steps_,
          micro_step_ + 1);
  schedule_.on_final(nullptr);  // what is reduced from here on is updated below
  end_micro_step();
  settle_mean();
  phase_ = Phase::kIdle;
  joined_.reset();
  for (const auto& unit : units_) unit->finish_step(compute_);
  if (early_) {
    try {
      finish_early_update();
    } catch (...) {
      early_.reset();
      throw;
    }
  }
  context_.mesh.agree(compute_);
  if (context_.options.unused_parameters == UnusedParameters::kSkip) find_unused();
  // After the gather of the norm all gathers are done, those that nobody used as well, and the
  // optimizer may write what they read. Where no norm is gathered:
  const Placement& placement = context_.options.placement;
  if (placement.parameters != shard::Place::kWhole &&
      context_.mesh.group_of(placement.optimizer) == nullptr) {
    compute_.wait(context_.gather.record("gathered"));
  }
  const std::optional<Early> early = std::exchange(early_, std::nullopt);
  GradNorm norm = reduce_norm(context_, compute_, units_, mean_scale());
  if (!compute_.is_capturing()) {
    std::erase_if(norms_in_flight_, [](const GradNorm& n) { return n.is_known(); });
    norms_in_flight_.push_back(norm);
  }
  if (unsettled_) unsettled_->norm = norm;
  phase_ = early ? Phase::kIdle : Phase::kFinished;
  if (early && updates_on_host()) {
    for (Unit* unit : update_order()) gather_updated(*unit);
    early->update.end();
  }
  return norm;
}

void Fsdp::find_unused() {
  std::vector<std::uint8_t> used;
  for (const auto& unit : units_) used.insert(used.end(), unit->used().begin(), unit->used().end());
  const std::vector<std::uint8_t> all = gather_to_host(used, "used");
  for (std::size_t i = 0; i < all.size(); ++i) used[i % used.size()] |= all[i];
  auto next = used.begin();
  for (const auto& unit : units_) {
    std::vector<std::uint8_t> unused(unit->used().size());
    for (std::uint8_t& is_unused : unused) is_unused = *next++ == 0 ? 1 : 0;
    unit->set_unused(std::move(unused));
  }
}

void Fsdp::check_whole(std::string_view caller) const {
  require(phase_ != Phase::kBroken,
          "[{}] expected units that are whole, got an Fsdp whose trainable_changed() failed",
          caller);
}

void Fsdp::cancel_step() {
  require(!early_ || early_->updated.empty(),
          "[fsdp] expected finish_step() after a backward that has updated parameters, got "
          "cancel_step()");
  schedule_.on_final(nullptr);
  early_.reset();
  schedule_.cancel(compute_);
  const bool is_updated = phase_ == Phase::kIdle;  // then there is nothing to give up
  if (unsettled_ && !is_updated) unsettled_->norm.reset();
  phase_ = Phase::kIdle;
  joined_.reset();
}

void Fsdp::settle_step() const {
  if (!unsettled_) return;
  require(
      phase_ != Phase::kStep,
      "[fsdp] expected finish_step() or cancel_step() before what hooks remember is read, got a "
      "step of which {} of {} micro-steps have begun",
      micro_step_ + 1, num_micro_steps_);
  const std::optional<GradNorm>& norm = unsettled_->norm;
  const bool counts = norm && (compute_.device().is_meta || norm->not_finite().empty());
  unsettled_.reset();
  for (const auto& unit : units_) {
    if (unit->reducer() != nullptr) unit->reducer()->end_step(counts);
  }
}

}  // namespace tessera::shard
