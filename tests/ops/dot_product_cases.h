// Attention of separate queries, keys and values, as the tests on the CPU and on a GPU check it:
// cases of any sizes, and masks of each kind with what they let a query see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ops/dot_product_attention.h"
#include "tests/testing/gradcheck.h"

namespace tessera::testing {

struct AttentionSizes {
  std::int64_t B, T, S, H, KV, D, E;
};

using Mask = std::function<Tensor(Tape&, DType)>;
using Sees = std::function<bool(std::int64_t b, std::int64_t t, std::int64_t s)>;

inline OpCase dot_product_case(const AttentionSizes& z, float scale = 0, const Mask& mask = {}) {
  return {.inputs = {{z.B, z.T, z.H, z.D}, {z.B, z.S, z.KV, z.D}, {z.B, z.S, z.KV, z.E}},
          .build = [=](Tape& tape, const auto& x, auto&) {
            return ops::dot_product_attention(
                tape, x[0], x[1], x[2],
                {.scale = scale, .mask = mask ? mask(tape, x[0].dtype()) : Tensor()});
          }};
}

/// Where the document of token t begins: of the first row two documents, of any other three.
inline std::int64_t document_begin(std::int64_t b, std::int64_t t) {
  if (b == 0) return t < 2 ? 0 : 2;
  return t < 1 ? 0 : t < 4 ? 1 : 4;
}

inline bool sees_its_document(std::int64_t b, std::int64_t t, std::int64_t s) {
  return s <= t && s >= document_begin(b, t);
}

/// (B, 1, 1, T, S); T = 1: the same for all queries.
inline Mask mask_of(std::int64_t B, std::int64_t T, std::int64_t S, const Sees& sees) {
  return [=](Tape& tape, DType dtype) {
    std::vector<float> values;
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t s = 0; s < S; ++s)
          values.push_back(sees(b, t, s) ? 0 : -std::numeric_limits<float>::infinity());
    return to_tensor(tape.memory(), {B, 1, 1, T, S}, values, dtype);
  };
}

struct MaskedCase {
  std::string name;
  AttentionSizes sizes;
  Mask mask;
  Sees sees;  ///< what the mask says
};

inline std::vector<MaskedCase> masked_cases() {
  const AttentionSizes more_keys{2, 3, 5, 4, 2, 6, 7}, as_many{2, 5, 5, 4, 2, 6, 7};
  const auto causal = [](std::int64_t window) -> Mask {
    return [=](Tape& tape, DType dtype) { return ops::causal_mask(tape, 3, 5, dtype, window); };
  };
  // Of the second sequence the last two keys.
  const Sees no_padding = [](std::int64_t b, auto, std::int64_t s) { return b == 0 || s < 3; };
  return {
      {"causal", more_keys, causal(0), [](auto, auto t, auto s) { return s <= t + 2; }},
      {"window", more_keys, causal(2), [](auto, auto t, auto s) { return s <= t + 2 && s > t; }},
      {"padding", more_keys, mask_of(2, 1, 5, no_padding), no_padding},
      {"documents", as_many, mask_of(2, 5, 5, sees_its_document), sees_its_document}};
}

}  // namespace tessera::testing
