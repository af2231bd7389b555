// What a Trainer does about a step that its StepGuard doubts.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/error.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

using engine::Tensor;

// Decides, before the update, whether what the passes came to is believed.
shard::GradNorm Trainer::guard(std::int64_t step, const Loss& loss, const Tensor& values,
                               const shard::GradNorm& first, std::string& replayed) {
  const std::int64_t accum = config_.train.accum;
  shard::GradNorm norm = first;
  const auto outcome = [&](bool with_gradient) {
    std::vector<float> mine = engine::to_vector<float>(values.slice(0, {accum}));
    for (const float x :
         with_gradient ? checksums_of(fsdp_) : std::vector<float>(kNumChecksumFloats)) {
      mine.push_back(x);
    }
    return StepOutcome{world_.size(), gather(mine), norm.not_finite(), copies_apart(fsdp_)};
  };
  // Most steps need no pass over the gradient.
  if (const StepOutcome losses = outcome(false); !guard_->doubts(step + 1, losses)) {
    guard_->learn(losses.mean_loss());
    return norm;
  }
  const auto replay = [&] {
    fsdp_.parameters_changed();  // a copy that is kept may be what was wrong
    Batch again;
    norm = run_passes(
        step, loss, values,
        [&](std::int64_t micro) -> const Batch& {
          again = load_batch(memory_, data_->tensors, [&](const Batch& host) {
            data_->fill(first_sample(step * accum + micro), host);
          });
          return again;
        },
        nullptr);
    return outcome(true);
  };
  const StepGuard::Verdict verdict = guard_->judge(step + 1, outcome(true), replay);
  replayed = verdict.remark.empty() ? "equal" : verdict.remark;
  if (!verdict.remark.empty() && log_ != nullptr) {
    log_->say(fmt::format("warning: step {}: {}", step + 1, verdict.remark),
              Console::Style::kWarning);
  }
  if (verdict.is_damaged) {
    engine::fail<engine::DeviceError>(
        "[train] expected memory that keeps what is written, got a step before which {}: go on "
        "from "
        "a checkpoint (step {})",
        verdict.is_wrong, step + 1);
  }
  const bool may_skip = config_.train.max_skips > 0 && !verdict.outcome.not_finite.empty();
  if (verdict.is_wrong.empty() || may_skip) return norm;
  std::string where = "no checkpoint, as checkpoint.every is 0";
  if (checkpoints_) {
    checkpoints_->save(behind(step));
    checkpoints_->finish();
    where = fmt::format("the state before it is in {}", checkpoints_->newest());
  }
  engine::fail("[train] expected a step to go on from, got one of which {}{} (step {}; {})",
               verdict.is_wrong,
               verdict.remark.empty() ? ", made again from the same state as well" : "", step + 1,
               where);
}

}  // namespace tessera::tools
