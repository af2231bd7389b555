// The next token of a text, of the logits that a model gives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/philox.h"

namespace tessera::tools {

struct Sampling {
  double temperature = 0;  ///< logits are divided by it; 0: the likeliest token is taken
  std::int64_t top_k = 0;  ///< of the so many likeliest tokens; 0: of all
  double top_p = 1;        ///< and of these of as few as have this probability together; in (0, 1]
  std::uint64_t seed = 0;
};

/// Draws for one prompt. What it draws depends on seed, prompt, place and logits alone.
class Sampler {
 public:
  /// `prompt`: the number of the prompt.
  Sampler(const Sampling& sampling, std::uint64_t prompt)
      : sampling_(sampling), random_{sampling.seed, engine::fnv1a("generate") ^ prompt} {}

  /// A token in [0, logits.size()), of at least one, to stand at `place`. Of equal logits the
  /// first counts as the likelier. Throws InvalidArgument if a logit is NaN, or the largest is
  /// infinite.
  std::int32_t next(std::span<const float> logits, std::int64_t place);

 private:
  std::int32_t draw(std::span<const float> logits, float top, double uniform);

  Sampling sampling_;
  engine::RandomStream random_;
  // Of one call: here for their memory.
  std::vector<std::int32_t> tokens_;
  std::vector<double> sums_;
};

}  // namespace tessera::tools
