// Where the rows of heads lie, for attention on the CPU and on CUDA. Private to attention.
#pragma once

#include <cstdint>

namespace tessera::ops {

/// Sizes, and where a head's rows lie in qkv (B, T, (H + 2 KV) * D) and y (B, T, H * D).
struct AttentionLayout {
  std::int64_t batch, tokens, heads, kv_heads, head_size;
  float scale;
  bool causal;

  constexpr std::int64_t group() const { return heads / kv_heads; }
  constexpr std::int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_size; }
  constexpr std::int64_t y_width() const { return heads * head_size; }
  // First elements of the q, k, v and y rows of a head, and of its log-sum-exp.
  constexpr std::int64_t q_at(std::int64_t b, std::int64_t h) const {
    return b * tokens * qkv_width() + h * head_size;
  }
  constexpr std::int64_t k_at(std::int64_t b, std::int64_t g) const { return q_at(b, heads + g); }
  constexpr std::int64_t v_at(std::int64_t b, std::int64_t g) const {
    return k_at(b, kv_heads + g);
  }
  constexpr std::int64_t y_at(std::int64_t b, std::int64_t h) const {
    return b * tokens * y_width() + h * head_size;
  }
  constexpr std::int64_t lse_at(std::int64_t b, std::int64_t h) const {
    return (b * heads + h) * tokens;
  }
  // A row is one document. First key that a query of a sample sees, and one past the last query
  // that sees a key.
  static constexpr bool kHasDocuments = false;
  constexpr int first_key(int /*b*/, int /*query*/) const { return 0; }
  constexpr int end_query(int /*b*/, int /*key*/) const { return static_cast<int>(tokens); }
};

/// Of rows that documents share, on CUDA. Kernels are compiled for each of the two layouts, so that
/// rows of one document have nothing to ask for.
struct DocumentLayout : AttentionLayout {
  /// For each token of (B, T) the first one of its document, and one past the last. Neither falls
  /// from a token to the next.
  const std::int32_t *begins, *ends;

  static constexpr bool kHasDocuments = true;
  constexpr int first_key(int b, int query) const { return begins[b * tokens + query]; }
  constexpr int end_query(int b, int key) const { return ends[b * tokens + key]; }
};

}  // namespace tessera::ops
