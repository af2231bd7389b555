// The arithmetic of dispatch and combine, the same on the CPU and on a GPU. Private to ops.
#pragma once

#include <cstdint>

#include "engine/dtype.h"
#include "ops/dispatch.h"

namespace tessera::ops {

// Rows of `num_tokens` tokens in buffers; T of the elements.
template <class T>
struct ExpertRows {
  T* buffers[kMaxExpertBuffers] = {};  // (rows, width) each; null: there is none
  bool accumulate[kMaxExpertBuffers] = {};
  std::int64_t rows = 0, width = 0, num_tokens = 0, k = 0;
  const std::int32_t* slots = nullptr;  // (num_tokens, k)

  // The row of choice `i` = n k + j; null: it has none.
  constexpr T* row(std::int64_t i) const {
    const std::int64_t slot = slots[i];
    if (slot < 0 || slot >= kMaxExpertBuffers * rows || buffers[slot / rows] == nullptr) {
      return nullptr;
    }
    return buffers[slot / rows] + slot % rows * width;
  }
  // row(i)[c] = or += value.
  constexpr void write(std::int64_t i, std::int64_t c, float value) const {
    if (T* dst = row(i); dst != nullptr) {
      const bool adds = accumulate[slots[i] / rows];
      engine::store_f32(dst[c], adds ? engine::to_f32(dst[c]) + value : value);
    }
  }
  // sum_j of gate (or 1) times row, at column c of token n.
  constexpr float sum(const float* gates, std::int64_t n, std::int64_t c) const {
    float total = 0;
    for (std::int64_t i = n * k; i < (n + 1) * k; ++i) {
      const T* src = row(i);
      if (src == nullptr) continue;
      total += gates == nullptr ? engine::to_f32(src[c]) : gates[i] * engine::to_f32(src[c]);
    }
    return total;
  }
  // The product of a row and x[n].
  constexpr float dot(const T* x, std::int64_t i) const {
    const T* src = row(i);
    float total = 0;
    for (std::int64_t c = 0; c < width && src != nullptr; ++c)
      total += engine::to_f32(x[i / k * width + c]) * engine::to_f32(src[c]);
    return total;
  }
};

}  // namespace tessera::ops
