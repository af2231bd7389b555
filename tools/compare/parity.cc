#include "tools/compare/parity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "engine/io/text.h"

namespace tessera::tools {
namespace {

// Of the schedule, of placement, and of what is said and saved alone.
bool keeps_bits(const std::string& key) {
  static const std::set<std::string> keys = {
      "parallel.strategy",
      "parallel.shard_ranks",
      "parallel.prefetch",
      "parallel.backward_prefetch",
      "parallel.reductions_in_flight",
      "parallel.reshard_after_forward",
      "parallel.unit_min_numel",
      "parallel.bucket_mb",
      "parallel.deadline_s",
      "cpu.pin",
      "offload.parameters",
      "offload.gradients",
      "offload.optimizer",
      "offload.threads",
      "train.recompute",
      "train.overlap_optimizer",
      "train.check_gradients",
      "train.max_skips",
      "sample.tokens",
      "powersgd.offload_error",
      "out",
      "audit",
      "memory_budget",
  };
  return keys.contains(key) || key.starts_with("log.") || key.starts_with("rates.");
}

// A square of all elements of a unit depends on which blocks the unit has.
bool changes_units(const std::string& key) {
  return key == "parallel.unit_min_numel" || key == "parallel.bucket_mb" ||
         key == "parallel.strategy";
}

bool same_micro_batches(const Configuration& a, const Configuration& b) {
  const auto samples = [](const Configuration& c) { return c.num_ranks * c.config.train.accum; };
  const bool reduces_each = a.config.train.accum_comm == AccumComm::kEvery &&
                            b.config.train.accum_comm == AccumComm::kEvery;
  const bool is_exact = a.options.at("comm.hook") == "\"none\"" && reduces_each;
  return samples(a) == samples(b) && is_exact;
}

// The first step whose loss differs, and the largest difference.
void compare_losses(const RunRecord& a, const RunRecord& b, Parity& parity) {
  const std::size_t num_steps = std::min(a.loss.size(), b.loss.size());
  for (std::size_t i = 0; i < num_steps; ++i) {
    const double difference = loss_difference(a.loss[i], b.loss[i]);
    if (difference == 0) continue;
    const auto step = static_cast<std::int64_t>(i) + 1;
    parity.first_step = std::min(parity.first_step.value_or(step), step);
    parity.max_difference = std::max(parity.max_difference, difference);
  }
}

std::string distance_text(const Parity& p) {
  if (!p.first_step) {
    return p.equal_parameters ? "no difference" : "equal losses, other parameters at the end";
  }
  return fmt::format("loss differs by {}, first in step {}",
                     std::isfinite(p.max_difference) ? fmt::format("up to {:.3g}", p.max_difference)
                                                     : "what is not finite",
                     *p.first_step);
}

}  // namespace

std::string name_of(ParityKind kind) {
  switch (kind) {
    case ParityKind::kEqualBits:
      return "equal bits";
    case ParityKind::kWithin:
      return "within";
    case ParityKind::kDiffers:
      return "differs";
    case ParityKind::kUnknown:
      break;
  }
  return "unknown";
}

double loss_difference(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double difference = std::abs(a - b);
  return std::isfinite(difference) ? difference : std::numeric_limits<double>::infinity();
}

std::vector<std::string> arithmetic_differences(const Configuration& a, const Configuration& b) {
  std::vector<std::string> reasons;
  const bool same_batches = same_micro_batches(a, b);
  const bool in_order = a.sums_in_rank_order && b.sums_in_rank_order;
  const bool is_square = b.options.at("comm.hook").find("batched") != std::string::npos;
  for (const auto& [key, value] : b.options) {
    const auto other = a.options.find(key);
    if (other != a.options.end() && other->second == value) continue;
    const bool deals = key == "parallel.ranks" || key == "train.accum";
    // The host prepares its part of AdamW in double precision as the GPU does its own, but for the
    // last bit.
    const bool is_host_part =
        b.on_gpu && (key == "offload.optimizer" || key == "memory_budget");  // which may offload it
    const bool is_nccl_order = !in_order && key.starts_with("parallel.");
    const bool is_exact = (deals && same_batches) || keeps_bits(key);
    if (!is_exact || is_host_part || is_nccl_order || (is_square && changes_units(key))) {
      reasons.push_back(key);
    }
  }
  return reasons;
}

Parity compare_runs(const RunRecord& baseline, std::span<const RunRecord> runs,
                    std::vector<std::string> reasons, double tolerance) {
  Parity parity{.reasons = std::move(reasons), .equal_parameters = true};
  if (runs.empty()) return {.reasons = std::move(parity.reasons)};
  bool same_length = true;
  for (const RunRecord& run : runs) {
    compare_losses(baseline, run, parity);
    same_length = same_length && run.loss.size() == baseline.loss.size();
    parity.equal_parameters =
        parity.equal_parameters && run.params_sha256 == baseline.params_sha256;
  }
  const bool is_equal = !parity.first_step && same_length && parity.equal_parameters;
  if (is_equal) {
    parity.kind = ParityKind::kEqualBits;
    parity.text = "equal bits";
  } else if (parity.reasons.empty()) {
    parity.kind = ParityKind::kDiffers;
    parity.text = same_length ? distance_text(parity) : "another number of steps";
  } else {
    const bool is_within = parity.max_difference <= tolerance;
    parity.kind = is_within ? ParityKind::kWithin : ParityKind::kDiffers;
    parity.text = fmt::format("{}, {} the tolerance of {:g} ({} changes the arithmetic)",
                              distance_text(parity), is_within ? "within" : "beyond", tolerance,
                              engine::join(parity.reasons, ", "));
  }
  return parity;
}

}  // namespace tessera::tools
