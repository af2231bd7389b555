// Cross-entropy in double precision, as the tests of the CPU's and the GPU's compare with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/cross_entropy.h"
#include "ops/losses/weighted_cross_entropy.h"
#include "tests/testing/gradcheck.h"

namespace tessera::testing {

using Targets = std::vector<std::int32_t>;

inline constexpr std::int32_t kIgnore = -100;

inline Tensor to_targets(const Memory& memory, const Targets& values) {
  return Tensor::from<std::int32_t>(memory, {static_cast<std::int64_t>(values.size())}, values,
                                    "targets");
}

/// Targets all over the vocabulary, both ends included, and some to ignore.
inline Targets some_targets(std::int64_t rows, std::int64_t vocab_size,
                            std::int32_t ignore = kIgnore) {
  Targets t(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < t.size(); ++i)
    t[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i * 7919) % vocab_size);
  t[0] = static_cast<std::int32_t>(vocab_size - 1);
  for (std::size_t i = 3; i < t.size(); i += 5) t[i] = ignore;
  return t;
}

/// ops::cross_entropy of logits (targets, V); scale multiplies them.
inline OpCase cross_entropy_case(const Targets& targets, std::int64_t vocab_size, float scale = 1,
                                 std::int32_t ignore = kIgnore) {
  return {.inputs = {{static_cast<std::int64_t>(targets.size()), vocab_size}},
          .build =
              [=](Tape& tape, const auto& x, auto&) {
                return ops::cross_entropy(tape, x[0], to_targets(tape.memory(), targets), ignore);
              },
          .scale = scale};
}

/// ops::cross_entropy_rows of logits (targets, V); scale multiplies them.
inline OpCase cross_entropy_rows_case(const Targets& targets, std::int64_t vocab_size,
                                      float scale = 1, std::int32_t ignore = kIgnore) {
  return {.inputs = {{static_cast<std::int64_t>(targets.size()), vocab_size}},
          .build =
              [=](Tape& tape, const auto& x, auto&) {
                return ops::cross_entropy_rows(tape, x[0], to_targets(tape.memory(), targets),
                                               ignore);
              },
          .scale = scale};
}

/// ops::linear_cross_entropy of x (targets, width) and w (V, width).
inline OpCase linear_case(const Targets& targets, std::int64_t vocab_size, std::int64_t width,
                          const ops::LinearCrossEntropyOptions& options = {}, float scale = 1) {
  return {.inputs = {{static_cast<std::int64_t>(targets.size()), width}},
          .parameters = {{vocab_size, width}},
          .build =
              [=](Tape& tape, const auto& x, auto& p) {
                return ops::linear_cross_entropy(tape, x[0], p[0],
                                                 to_targets(tape.memory(), targets), options);
              },
          .scale = scale};
}

/// Weights of classes, from 0 to 3.
inline std::vector<float> some_class_weights(std::int64_t num_classes) {
  std::vector<float> weights;
  for (std::int64_t v = 0; v < num_classes; ++v)
    weights.push_back(v % 5 == 2 ? 0 : static_cast<float>(v * 37 % 24 + 1) / 8);
  return weights;
}

/// ops::weighted_cross_entropy of logits (targets, V), with some_class_weights().
inline OpCase weighted_case(const Targets& targets, std::int64_t num_classes,
                            std::int32_t ignore = kIgnore) {
  return {.inputs = {{static_cast<std::int64_t>(targets.size()), num_classes}},
          .build = [=](Tape& tape, const auto& x, auto&) {
            const Tensor weights = Tensor::from<float>(
                tape.memory(), {num_classes}, some_class_weights(num_classes), "class_weights");
            return ops::weighted_cross_entropy(tape, x[0], to_targets(tape.memory(), targets),
                                               weights, ignore);
          }};
}

struct NaiveLoss {
  double loss = 0;
  Values dlogits;     // without the weight
  double weight = 0;  // 1 of a sum
  Values rows = {};   // losses, 0 for ignored rows
};

inline NaiveLoss naive_cross_entropy(const Values& logits, const Targets& targets,
                                     std::int32_t ignore, bool is_sum = false) {
  const std::size_t vocab_size = logits.size() / targets.size();
  const auto counted =
      is_sum ? 1
             : static_cast<double>(targets.size()) -
                   static_cast<double>(std::count(targets.begin(), targets.end(), ignore));
  NaiveLoss result{0, Values(logits.size()), 1 / counted, Values(targets.size())};
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] == ignore) continue;
    const double* x = logits.data() + i * vocab_size;
    double* dx = result.dlogits.data() + i * vocab_size;
    const double max = *std::max_element(x, x + vocab_size);
    double sum = 0;
    for (std::size_t v = 0; v < vocab_size; ++v) sum += std::exp(x[v] - max);
    result.rows[i] = std::log(sum) + max - x[targets[i]];
    result.loss += result.rows[i] / counted;
    for (std::size_t v = 0; v < vocab_size; ++v) dx[v] = std::exp(x[v] - max) / sum;
    dx[targets[i]] -= 1;
  }
  return result;
}

struct NaiveLinear {
  double loss = 0;
  Values dx, dw;
  double max_logit = 0;  // absolute
};

/// linear_case() as `run` ran it; logits and softmax - onehot rounded by `round`.
template <class Round>
NaiveLinear naive_linear_cross_entropy(const OpRun& run, const Targets& targets,
                                       std::int32_t ignore, Round round, bool is_sum = false) {
  const Values &x = run.leaves[0], &w = run.leaves[1];
  const std::size_t n = targets.size(), width = x.size() / n, vocab_size = w.size() / width;
  Values logits(n * vocab_size);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t v = 0; v < vocab_size; ++v) {
      double sum = 0;
      for (std::size_t c = 0; c < width; ++c) sum += x[i * width + c] * w[v * width + c];
      logits[i * vocab_size + v] = round(sum);
    }
  const NaiveLoss naive = naive_cross_entropy(logits, targets, ignore, is_sum);
  NaiveLinear result{naive.loss, Values(x.size()), Values(w.size()), max_abs(logits)};
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t v = 0; v < vocab_size; ++v) {
      const double d = round(naive.dlogits[i * vocab_size + v]) * naive.weight * run.dy[0];
      for (std::size_t c = 0; c < width; ++c) {
        result.dx[i * width + c] += d * w[v * width + c];
        result.dw[v * width + c] += d * x[i * width + c];
      }
    }
  return result;
}

inline double round_to_nothing(double x) { return x; }

}  // namespace tessera::testing
