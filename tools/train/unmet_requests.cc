#include "tools/train/unmet_requests.h"

#include <fmt/format.h>

#include <cstdint>

#include "tools/train/step_guard.h"

namespace tessera::tools {

std::vector<std::string> unmet_requests(const TrainConfig& config, const TrainPosition& start) {
  const StepConfig& c = config.train;
  std::vector<std::string> lines;
  if (config.checkpoint.resume == "auto" && !config.checkpoint.saves()) {
    lines.emplace_back(
        "this run saves nothing that the next --resume=auto could go on from: give "
        "--checkpoint.every=N");
  }
  if (start.step >= c.steps) {
    if (start.step > 0) {
      lines.push_back(
          fmt::format("no step is left to train: train.steps={}, and as many are done", c.steps));
    }
    return lines;
  }
  if (static_cast<float>(c.lr) == 0)
    lines.push_back(fmt::format("no parameter is updated: train.lr={}", c.lr));
  if (c.warmup > c.steps && c.lr > 0) {
    lines.push_back(
        fmt::format("the warmup is longer than the run (train.warmup={}, train.steps={}): the "
                    "learning rate ends at {:.3g} and never reaches train.lr={}",
                    c.warmup, c.steps, c.lr_at(c.steps - 1), c.lr));
  }
  if (c.verify_every > 0 && c.steps / c.verify_every == start.step / c.verify_every) {
    lines.push_back(
        fmt::format("no step is verified: train.verify_every={}, and the run has the "
                    "steps {} to {}",
                    c.verify_every, start.step + 1, c.steps));
  }
  // A loss is measured against those of the steps before it.
  const std::int64_t num_losses = std::ssize(start.losses) + c.steps - start.step - 1;
  if (c.spike_factor > 0 && num_losses < std::int64_t{StepGuard::kFewest}) {
    lines.push_back(
        fmt::format("no loss is checked by train.spike_factor={}: that takes {} steps before it, "
                    "and the last loss has {}",
                    c.spike_factor, StepGuard::kFewest, num_losses));
  }
  if (config.comm.options().compresses() && config.comm.powersgd.start_step >= c.steps) {
    lines.push_back(
        fmt::format("nothing is compressed by comm.hook={}: powersgd.start_step={}, "
                    "and train.steps={}",
                    config.comm.hook, config.comm.powersgd.start_step, c.steps));
  }
  return lines;
}

}  // namespace tessera::tools
