// Looks at a step before its update: one that looks wrong, or whose turn it is to be verified, is
// made again from the same state. A machine that computes as it should comes to the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "shard/fsdp.h"
#include "tools/config/train_config.h"

namespace tessera::tools {

/// What a step came to, as all ranks know it.
struct StepOutcome {
  int num_ranks = 1;
  /// Rank by rank: the losses of its micro-steps, and what checksums_of() returned there.
  std::vector<float> values;
  std::string not_finite;  ///< a gradient; empty: none
  /// Ranks that are that far apart keep copies of the same parameters; 0: none do.
  int copies_apart = 0;
  /// What the sum of all losses is divided by for their mean.
  double num_loss_terms = 1;

  std::span<const float> of(int rank) const;
  /// Summed in the order of the samples.
  double mean_loss() const;
  /// What differs from `other`, bit by bit: "loss on rank 1", or if all losses are the same, the
  /// gradient, to whose sums all ranks have contributed. Empty: nothing.
  std::string difference(const StepOutcome& other) const;
  /// Of which ranks the parameters have changed since `other`, or are no copies of each other,
  /// which no step does. Empty: of none.
  std::string damage(const StepOutcome& other) const;
};

/// Of this rank's part of the gradient, and of the parameters that it keeps, each in two floats of
/// any bits. Blocks until the gradient is reduced.
std::vector<float> checksums_of(shard::Fsdp& fsdp);
inline constexpr std::size_t kNumChecksumFloats = 4;
/// See StepOutcome.
int copies_apart(const shard::Fsdp& fsdp);

class StepGuard {
 public:
  /// The latest losses that a spike is measured against, and how many there must be.
  static constexpr std::size_t kHistory = 32, kFewest = 8;

  explicit StepGuard(const StepConfig& config) : config_(config) {}

  /// Whether the outcome of `step`, from 1, must be known before its update.
  bool watches(std::int64_t step) const;
  /// Whether judge() would have it made again. Looks at no checksum.
  bool doubts(std::int64_t step, const StepOutcome& outcome) const;
  /// A loss that is believed.
  void learn(double loss);
  /// The latest of these, oldest first, for whoever goes on with the training.
  const std::vector<double>& losses() const { return losses_; }
  struct Verdict {
    StepOutcome outcome;
    std::string remark = {};    ///< for the log: what was wrong, and is right now; empty: nothing
    std::string is_wrong = {};  ///< what is wrong again: not to be updated with; empty: nothing
    bool is_replayed = false;
    bool is_damaged = false;  ///< what is wrong are the parameters: not to be saved either
  };
  /// `replay` makes the step again from the same state; the gradient is then that of the last call.
  Verdict judge(std::int64_t step, StepOutcome first, const std::function<StepOutcome()>& replay);

 private:
  bool is_due(std::int64_t step) const;
  std::string suspicion(const StepOutcome& outcome) const;
  double median() const;

  const StepConfig& config_;
  std::vector<double> losses_;  // the latest, oldest first
};

}  // namespace tessera::tools
