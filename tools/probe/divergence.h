// Where two recorded runs (--log.probe) part: the first tensor, in the order of a step, of which
// they have different bits.
//
// [Note: what can be compared] Gathered parameters, sums of gradients, updated parameters and
// states are the same whatever the ranks. Activations and the gradients of one micro-batch are
// known by the number that it has among those of all ranks, so one process that accumulates
// compares with ranks, if both make as many micro-batches of as many samples of a step. A gradient
// that is kept over several micro-steps (train.accum_comm=last) is that of a rank, and compares
// with that of the same rank alone. What does not compare is counted and says why.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/probe/probe_record.h"

namespace tessera::tools {

/// Of a tensor of that shape.
std::int64_t numel_of(const std::vector<std::int64_t>& shape);

/// What one run has of the tensor.
struct DivergentSide {
  std::string unit;
  std::string dtype;
  Checksum checksum;  ///< of the whole
  /// Two ranks that hold the same elements with different bits, from `begin` on; -1: none do.
  int rank = -1, other_rank = -1;
  std::int64_t begin = 0;
};

struct Divergence {
  ProbeKey key;
  std::vector<std::int64_t> shape;
  DivergentSide a, b;
};

struct NotCompared {
  std::string reason;
  std::int64_t count;
};

struct DivergenceReport {
  std::int64_t first_step = 0, last_step = 0;  ///< that both have
  std::int64_t num_compared = 0;               ///< tensors of which both have a checksum
  std::int64_t num_before = 0;                 ///< of these, ahead of the first that differs
  std::int64_t num_differing = 0;
  std::optional<Divergence> first = {};
  std::vector<NotCompared> not_compared = {};
};

/// Options by which two trainings would be of other models, data or seeds. Throws InvalidArgument
/// naming the option and both values. `a`, `b`: options as JSON literals.
void check_same_training(const std::map<std::string, std::string>& a,
                         const std::map<std::string, std::string>& b);

/// An option, or a part of the arithmetic, of which two trainings have other values, as JSON
/// literals; empty: no such option.
struct OptionDifference {
  std::string key, a, b;
};
/// The options that differ, but for those that say where output goes and what is told.
std::vector<OptionDifference> differing_options(const std::map<std::string, std::string>& a,
                                                const std::map<std::string, std::string>& b);

/// What decides bits besides options and data, if both records tell it: see ProbeHeader.
std::vector<OptionDifference> differing_arithmetic(const ProbeHeader& a, const ProbeHeader& b);
/// Whether both records tell their data, and these are not the same.
bool have_other_data(const ProbeHeader& a, const ProbeHeader& b);

/// Throws as check_same_training(); InvalidArgument for records that have no step or tensor in
/// common, or tensors of another shape; IoError for one that contradicts itself.
DivergenceReport compare_probes(const ProbeRun& a, const ProbeRun& b);

/// Where the values of a tensor differ, in its flat order.
struct ValueDifference {
  std::int64_t num_differing = 0;
  std::int64_t first_index = 0;
  float a = 0, b = 0;         ///< there
  double max_abs = 0;         ///< largest |a - b|; NaN if one is not a number
  std::int64_t max_ulps = 0;  ///< floats between them, at most; of f32, NaN aside
};
/// By bits. Throws InvalidArgument if sizes differ.
ValueDifference difference_of(std::span<const float> a, std::span<const float> b);

/// All values that the record has of `key`, those of `rank` where it has some, from `begin` on.
/// Throws IoError if some are missing.
std::vector<float> values_of(const ProbeRun& run, const ProbeKey& key, int rank = -1);

}  // namespace tessera::tools
