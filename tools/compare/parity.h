// Whether a configuration gives the numbers of the baseline: the loss of every step, and the
// parameters at the end.
//
// [Note: what must be equal] Which ranks hold what, when they gather and reduce, what is recomputed
// or offloaded, and how a step's micro-batches are dealt to ranks and micro-steps changes no bit on
// the CPU, or on GPUs whose sums are in the order of ranks: that is the engine's promise, and here
// it is held to it. Anything else - a dtype, a hook, one reduction at the end of accumulation,
// another model, rate or seed, another way to multiply - is another computation. It is compared by
// the largest difference of a step's loss, which must stay within the tolerance, and the page names
// the options that are the reason.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/compare/request.h"
#include "tools/compare/run_record.h"

namespace tessera::tools {

enum class ParityKind {
  kEqualBits,  ///< every loss and the parameters
  kWithin,     ///< another arithmetic, within the tolerance
  kDiffers,    ///< bits that must be equal and are not, or a distance beyond the tolerance
  kUnknown,    ///< nothing to compare with, or nothing to compare
};
/// "equal bits", "within", "differs", "unknown": for the JSON.
std::string name_of(ParityKind kind);

struct Parity {
  ParityKind kind = ParityKind::kUnknown;
  std::vector<std::string> reasons = {};        ///< options that change the arithmetic; empty: none
  double max_difference = 0;                    ///< of a step's loss; infinite if one is not finite
  std::optional<std::int64_t> first_step = {};  ///< that differs, from 1
  bool equal_parameters = false;
  std::string text = {};  ///< for people: "equal bits"; "differs by 1e-3, first in step 2"
};

/// Between two losses of a step: 0 if they are equal, or both not a number, which the logs call
/// null; infinite if one alone is not finite.
double loss_difference(double a, double b);

/// The options by which `b` computes other numbers than `a`, or the same in another order. Empty:
/// bits must be equal.
std::vector<std::string> arithmetic_differences(const Configuration& a, const Configuration& b);

/// `runs` against `baseline`, one run of it; each of them must pass. `reasons`: see above.
Parity compare_runs(const RunRecord& baseline, std::span<const RunRecord> runs,
                    std::vector<std::string> reasons, double tolerance);

}  // namespace tessera::tools
