// Which configurations must have the same bits, and which may be held to a tolerance.
//
// [Note: what must be equal] Which ranks hold what, when they gather and reduce, what is recomputed
// or offloaded, and how a step's micro-batches are dealt to ranks and micro-steps changes no bit on
// the CPU, or on GPUs whose sums are in the order of ranks: that is the engine's promise, and here
// it is held to it. So configurations form classes of equal arithmetic, and within each class bits
// are compared. A dtype, a hook, one reduction at the end of accumulation, another way to multiply,
// or smaller micro-batches, and more of them, to meet a memory budget, compute the same training in
// another arithmetic: between such classes the largest difference of a step's loss must stay within
// the tolerance. It is measured once for each class, as all of a class have the same bits. Another
// model, learning rate, seed or batch is another training: its losses are shown with the others,
// and nothing is expected of them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tools/compare/request/request.h"

namespace tessera::tools {

/// What another value of an option does to the numbers of a training.
enum class OptionEffect {
  kNone,        ///< equal bits
  kArithmetic,  ///< an equal training, rounded or added up in another way
  kTraining,    ///< another training
};
/// What the option `key` does whatever the others are; see arithmetic_differences() for what
/// depends on them.
OptionEffect effect_of(const std::string& key);

/// The options by which `b` computes other numbers than `a`, or the same in another order. Empty:
/// bits must be equal. "memory_budget" is one of them where budgets make micro-batches of different
/// sizes, which check_plans() finds out.
std::vector<std::string> arithmetic_differences(const Configuration& a, const Configuration& b);
/// The options by which `b` is another training than `a`; empty: it is the same one.
std::vector<std::string> training_differences(const Configuration& a, const Configuration& b);

/// Configurations of equal arithmetic.
struct ArithmeticClass {
  std::vector<std::size_t> members = {};  ///< in their order
  /// The class of the same training that its losses are measured against; itself: it is the first.
  std::size_t measured_against = 0;
  /// The options that set it apart from that class, or from the first of all if it is itself.
  std::vector<std::string> changes = {};
  /// The values that set it apart: "precision.param=bf16"; of one class alone: empty.
  std::string label = {};
};

/// In the order of their first members: the first has the baseline.
std::vector<ArithmeticClass> classes_of(const std::vector<Configuration>& configurations);

}  // namespace tessera::tools
