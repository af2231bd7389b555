// The keys and values of the tokens that a model has read, so that it reads each of them once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/tape.h"
#include "ops/attention.h"

namespace tessera::tools {

/// Of one sequence, for forwards that are not recorded. Keys and values are kept as they are
/// computed, in that dtype.
class KeyValueCache {
 public:
  /// Each layer takes memory for `max_tokens` when it first has some.
  explicit KeyValueCache(std::int64_t max_tokens) : max_tokens_(max_tokens) {}

  std::int64_t num_tokens() const { return num_tokens_; }

  // For models: a forward begins, each layer attends, and the forward ends.

  /// Throws InvalidArgument if there is no place for `count` tokens more.
  void begin(engine::Tape& tape, std::int64_t count);
  /// (count) i32, where the new tokens stand, which ops::rope() asks for; undefined where that is
  /// 0 and onwards.
  const engine::Tensor& positions() const { return positions_; }
  /// Attention of the new tokens, of which `qkv` (1, count, ...) is, to all tokens: y (1, count,
  /// ...) has the values that ops::attention() of all of them has there, to rounding; the first
  /// time with equal bits. Adds their keys and values to those of layer `layer`. Later several
  /// tokens at once take memory for count x tokens scores of each head; the first time they do not.
  engine::Tensor attention(engine::Tape& tape, std::size_t layer, const engine::Tensor& qkv,
                           const ops::AttentionShape& shape);
  void end() { num_tokens_ += num_new_; }

 private:
  struct Layer {
    engine::Tensor keys, values;  // (1, max_tokens, KV, D)
  };

  std::int64_t max_tokens_, num_tokens_ = 0, num_new_ = 0;
  engine::Tensor positions_, mask_;
  std::vector<Layer> layers_;
};

}  // namespace tessera::tools
