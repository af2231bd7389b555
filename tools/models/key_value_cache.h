// The keys and values of the tokens that a model has read, so that it reads each of them once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/tape.h"
#include "ops/attention.h"

namespace tessera::tools {

/// Of one text, or of several that a forward reads together; for forwards that are not recorded.
/// Keys and values are kept as they are computed, in that dtype.
class KeyValueCache {
 public:
  /// Of one text. Each layer takes memory for `max_tokens` when it first has some.
  explicit KeyValueCache(std::int64_t max_tokens) : max_tokens_(max_tokens) {}
  /// Of several texts, of any lengths, that one forward reads as many new tokens of: row b of its
  /// tokens is of the b-th. Each keeps its own, which outlive this, and may be of another batch
  /// next time.
  static KeyValueCache of_batch(std::vector<KeyValueCache*> texts);

  /// Of several texts the most that one has.
  std::int64_t num_tokens() const { return num_tokens_; }

  // For models: a forward begins, each layer attends, and the forward ends.

  /// Throws InvalidArgument if there is no place for `count` tokens more of each text.
  void begin(engine::Tape& tape, std::int64_t count);
  /// (count) i32, of several texts (B, count): where the new tokens stand, which ops::rope() asks
  /// for; undefined where that is 0 and onwards.
  const engine::Tensor& positions() const { return positions_; }
  /// Attention of the new tokens, of which `qkv` (B, count, ...) is, to all tokens of their text: y
  /// (B, count, ...) has the values that ops::attention() of all of them has there, to rounding; a
  /// text's first time with equal bits. Adds their keys and values to those of layer `layer`. Later
  /// several tokens at once take memory for count x tokens scores of each head; the first time they
  /// do not.
  engine::Tensor attention(engine::Tape& tape, std::size_t layer, const engine::Tensor& qkv,
                           const ops::AttentionShape& shape);
  void end();

 private:
  struct Layer {
    engine::Tensor keys, values;  // (1, max_tokens, KV, D)
  };

  engine::Tensor batch_attention(engine::Tape& tape, std::size_t layer, const engine::Tensor& qkv,
                                 const ops::AttentionShape& shape);

  std::int64_t max_tokens_, num_tokens_ = 0, num_new_ = 0;
  engine::Tensor positions_, mask_;
  std::vector<Layer> layers_;
  std::vector<KeyValueCache*> texts_;  // none: it is of one itself
};

}  // namespace tessera::tools
