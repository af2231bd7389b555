// What a Trainer does about a step that its StepGuard doubts.
#include <fmt/format.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/copy.h"
#include "engine/error.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

using engine::Tensor;

// [Note: the memory of a step that is made again]
// It is that of any step, but for the few values that ranks compare: batches are read again into
// the loader's own memory, and the norm of the passes before is dropped first. Peaks that are no
// more than bytes apart may still differ, so the planner makes such a step too: plan_guard() below
// gathers and repeats where guard() does.

// The passes of `step` again, from the same state. `norm`: that of the passes before.
void Trainer::repeat_passes(std::int64_t step, const Loss& loss, const Tensor& values,
                            std::optional<shard::GradNorm>& norm) {
  norm.reset();
  fsdp_.parameters_changed();  // a copy that is kept may be what was wrong
  const std::int64_t first = (step - start_.step) * config_.train.accum;
  norm = run_passes(
      step, loss, values,
      [&](std::int64_t micro) -> const Batch& { return batches_->again(first + micro); }, nullptr);
}

// Launches on a meta device what guard() does of a step that is made again, or is not.
void Trainer::plan_guard(std::int64_t step, const Loss& loss, const Tensor& values,
                         std::optional<shard::GradNorm>& norm) {
  const std::vector<float> outcome(static_cast<std::size_t>(config_.train.accum) +
                                   kNumChecksumFloats);
  static_cast<void>(start_gather(outcome));
  if (step != repeated_) return;
  static_cast<void>(start_gather(outcome));
  repeat_passes(step, loss, values, norm);
  static_cast<void>(start_gather(outcome));
}

// Decides, before the update, whether what the passes came to is believed.
shard::GradNorm Trainer::guard(std::int64_t step, const Loss& loss, const Tensor& values,
                               shard::GradNorm first, std::string& replayed,
                               const std::function<void()>& finish_last) {
  const bool is_planned = compute_.device().is_meta;
  // A plan's plain steps are those that no turn to be verified makes again.
  const bool is_watched =
      is_planned ? config_.train.spike_factor > 0 || step == repeated_ : guard_->watches(step + 1);
  if (!is_watched) return first;
  const std::int64_t accum = config_.train.accum;
  std::optional<shard::GradNorm> norm = std::move(first);
  if (is_planned) {
    plan_guard(step, loss, values, norm);
    return *std::move(norm);
  }
  const auto outcome = [&](bool with_gradient) {
    std::vector<float> mine = engine::to_vector<float>(values.slice(0, {accum}));
    for (const float x :
         with_gradient ? checksums_of(fsdp_) : std::vector<float>(kNumChecksumFloats)) {
      mine.push_back(x);
    }
    return StepOutcome{.num_ranks = world_.size(),
                       .values = gather(mine),
                       .not_finite = norm->not_finite(),
                       .copies_apart = copies_apart(fsdp_),
                       .num_loss_terms = num_loss_terms()};
  };
  // Most steps need no pass over the gradient.
  if (const StepOutcome losses = outcome(false); !guard_->doubts(step + 1, losses)) {
    guard_->learn(losses.mean_loss());
    return *std::move(norm);
  }
  const auto replay = [&] {
    repeat_passes(step, loss, values, norm);
    return outcome(true);
  };
  const StepGuard::Verdict verdict = guard_->judge(step + 1, outcome(true), replay);
  replayed = verdict.remark.empty() ? kReplayedEqual : verdict.remark;
  if (!verdict.remark.empty() && log_ != nullptr) {
    log_->say(fmt::format("warning: step {}: {}", step + 1, verdict.remark),
              Console::Style::kWarning);
  }
  if (verdict.is_damaged) {
    engine::fail<engine::DeviceError>(
        "[train] expected memory that keeps what is written, got a step before which {}: go on "
        "from a checkpoint (step {})",
        verdict.is_wrong, step + 1);
  }
  const bool may_skip = config_.train.max_skips > 0 && !verdict.outcome.not_finite.empty();
  if (verdict.is_wrong.empty() || may_skip) return *std::move(norm);
  finish_last();  // else a log that goes on from here would lack it
  std::string where = "no checkpoint, as checkpoint.every is 0";
  if (checkpoints_) {
    checkpoints_->save(after(step));
    checkpoints_->finish();
    where = fmt::format("the state before it is in {}", checkpoints_->newest());
  }
  engine::fail("[train] expected a step to go on from, got one of which {}{} (step {}; {})",
               verdict.is_wrong,
               verdict.remark.empty() ? ", made again from the same state as well" : "", step + 1,
               where);
}

}  // namespace tessera::tools
