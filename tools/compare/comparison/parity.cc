#include "tools/compare/comparison/parity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/io/text.h"

namespace tessera::tools {
namespace {

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

std::string text_of(const Parity& p) {
  if (!p.same_length) return "another number of steps";
  if (!p.first_step) {
    return p.equal_parameters ? "no difference" : "equal losses, other parameters at the end";
  }
  return fmt::format("loss differs by {}, first in step {}",
                     std::isfinite(p.max_difference) ? "up to " + distance_text(p.max_difference)
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
    case ParityKind::kAnother:
      return "another training";
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

std::string distance_text(double difference) {
  if (difference >= 10) return fmt::format("{:.0f}", difference);
  if (difference == 0 || difference >= 0.00995) return fmt::format("{:.2g}", difference);
  const std::string text = fmt::format("{:.1e}", difference);  // "1.8e-03"
  const std::size_t e = text.find('e');
  return fmt::format("{}e{}", text.substr(0, e), std::stoi(text.substr(e + 1)));
}

Parity compare_runs(const RunRecord& reference, std::span<const RunRecord> runs,
                    std::vector<std::string> reasons, double tolerance) {
  Parity parity{.reasons = std::move(reasons), .equal_parameters = true};
  if (runs.empty()) return {.reasons = std::move(parity.reasons)};
  for (const RunRecord& run : runs) {
    compare_losses(reference, run, parity);
    parity.same_length = parity.same_length && run.loss.size() == reference.loss.size();
    parity.equal_parameters =
        parity.equal_parameters && run.params_sha256 == reference.params_sha256;
  }
  const bool is_equal = !parity.first_step && parity.same_length && parity.equal_parameters;
  const bool is_within =
      !parity.reasons.empty() && parity.same_length && parity.max_difference <= tolerance;
  if (is_equal) {
    parity.kind = ParityKind::kEqualBits;
    parity.text = "equal bits";
    return parity;
  }
  parity.kind = is_within ? ParityKind::kWithin : ParityKind::kDiffers;
  parity.text = text_of(parity);
  if (!parity.reasons.empty()) {
    parity.text += fmt::format("; {}{:g} allowed, as {} changes the arithmetic",
                               is_within ? "" : "no more than ", tolerance,
                               engine::join(parity.reasons, ", "));
  }
  return parity;
}

}  // namespace tessera::tools
