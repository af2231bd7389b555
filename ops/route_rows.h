// The arithmetic of the router, the same on the CPU and on a GPU. Private to ops.
#pragma once

#include <cstdint>

#include "engine/dtype.h"
#include "ops/vector_math.h"

namespace tessera::ops {

struct RouteView {
  std::int64_t num_tokens = 0, num_experts = 0, k = 0, capacity = 0;
  bool renormalise = false;
  float* probs = nullptr;           // (N, E)
  float* gates = nullptr;           // (N, k)
  std::int32_t* experts = nullptr;  // (N, k)
  std::int32_t* slots = nullptr;    // (N, k)
  std::int32_t* counts = nullptr;   // (E)
  float* means = nullptr;           // (E)
  float* aux = nullptr;             // ()

  // Probabilities, experts and gates of token n.
  template <class T>
  constexpr void choose(const T* logits, std::int64_t n) const {
    const T* x = logits + n * num_experts;
    float* p = probs + n * num_experts;
    float max = engine::to_f32(x[0]), sum = 0;
    for (std::int64_t e = 1; e < num_experts; ++e) {
      if (engine::to_f32(x[e]) > max) max = engine::to_f32(x[e]);
    }
    for (std::int64_t e = 0; e < num_experts; ++e) {
      p[e] = exp(engine::to_f32(x[e]) - max);
      sum += p[e];
    }
    for (std::int64_t e = 0; e < num_experts; ++e) p[e] /= sum;
    float chosen = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      std::int64_t best = -1;
      for (std::int64_t e = 0; e < num_experts; ++e) {
        bool is_taken = false;
        for (std::int64_t i = 0; i < j; ++i) is_taken = is_taken || experts[n * k + i] == e;
        if (!is_taken && (best < 0 || p[e] > p[best])) best = e;
      }
      experts[n * k + j] = static_cast<std::int32_t>(best);
      gates[n * k + j] = p[best];
      chosen += p[best];
    }
    for (std::int64_t j = 0; j < k && renormalise; ++j) gates[n * k + j] /= chosen;
  }

  // Who is at expert e, and where.
  constexpr void place(std::int64_t e) const {
    std::int64_t count = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      for (std::int64_t n = 0; n < num_tokens; ++n) {
        if (experts[n * k + j] != e) continue;
        slots[n * k + j] = static_cast<std::int32_t>(count < capacity ? e * capacity + count : -1);
        ++count;
      }
    }
    counts[e] = static_cast<std::int32_t>(count);
    double sum = 0;
    for (std::int64_t n = 0; n < num_tokens; ++n) sum += double{probs[n * num_experts + e]};
    means[e] = static_cast<float>(sum / static_cast<double>(num_tokens));
  }

  // After place() of all experts.
  constexpr void balance() const {
    double sum = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) sum += double(counts[e]) * double{means[e]};
    *aux = static_cast<float>(sum * static_cast<double>(num_experts) /
                              static_cast<double>(num_tokens * k));
  }

  // The gradient of token n's logits; `dgates` (N, k) or `daux` () may be null.
  template <class T>
  constexpr void backward(T* dlogits, bool accumulate, const float* dgates, const float* daux,
                          std::int64_t n) const {
    const float* p = probs + n * num_experts;
    const auto tokens = static_cast<float>(num_tokens);
    const float aux_scale = daux == nullptr ? 0.0f
                                            : *daux * static_cast<float>(num_experts) /
                                                  (tokens * static_cast<float>(k)) / tokens;
    float shift = 0, divisor = 1;
    if (renormalise && dgates != nullptr) {
      divisor = 0;
      for (std::int64_t j = n * k; j < (n + 1) * k; ++j) {
        shift += dgates[j] * gates[j];
        divisor += p[experts[j]];
      }
    }
    const auto dp = [&](std::int64_t e) {
      float d = aux_scale * static_cast<float>(counts[e]);
      for (std::int64_t j = n * k; j < (n + 1) * k && dgates != nullptr; ++j) {
        if (experts[j] == e) d += (dgates[j] - shift) / divisor;
      }
      return d;
    };
    float dot = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) dot += p[e] * dp(e);
    for (std::int64_t e = 0; e < num_experts; ++e) {
      T& dst = dlogits[n * num_experts + e];
      const float d = p[e] * (dp(e) - dot);
      engine::store_f32(dst, accumulate ? engine::to_f32(dst) + d : d);
    }
  }
};

}  // namespace tessera::ops
