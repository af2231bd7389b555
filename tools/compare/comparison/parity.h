// Whether runs give the same numbers: the loss of every step, and the parameters at the end. For
// which that must be so: [Note: what must be equal] in classes.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/compare/comparison/run_record.h"

namespace tessera::tools {

enum class ParityKind {
  kEqualBits,  ///< every loss and the parameters
  kWithin,     ///< another arithmetic, within the tolerance
  kDiffers,    ///< bits that must be equal and are not, or a distance beyond the tolerance
  kAnother,    ///< another training, of which nothing is expected
  kUnknown,    ///< nothing to compare with, or nothing to compare
};
/// "equal bits", "within", "differs", "another training", "unknown": for the JSON.
std::string name_of(ParityKind kind);

struct Parity {
  ParityKind kind = ParityKind::kUnknown;
  std::string reference = {};                   ///< the configuration that it is measured against
  std::vector<std::string> reasons = {};        ///< options that allow another number; empty: none
  double max_difference = 0;                    ///< of a step's loss; infinite if one is not finite
  std::optional<std::int64_t> first_step = {};  ///< that differs, from 1
  bool equal_parameters = false;
  bool same_length = true;  ///< as many steps
  std::string text = {};    ///< for people: "equal bits"; "differs by up to 1e-3, first in step 2"
};

/// Between two losses of a step: 0 if they are equal, or both not a number, which the logs call
/// null; infinite if one alone is not finite.
double loss_difference(double a, double b);

/// A difference for people: "1.8e-3", "0.25".
std::string distance_text(double difference);

/// `runs` against `reference`, one run; each of them must pass. `reasons`: empty where bits must be
/// equal, else the options for which the tolerance holds.
Parity compare_runs(const RunRecord& reference, std::span<const RunRecord> runs,
                    std::vector<std::string> reasons, double tolerance);

}  // namespace tessera::tools
