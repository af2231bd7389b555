// What ranks that generate hold.
#include "tools/generate/memory_need.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "engine/dtype.h"
#include "tools/models/family.h"
#include "tools/models/model.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

ModelConfig model_of() { return preset_config("smollm2-135m"); }

TEST(MemoryNeed, IsTheModelOnceInPartsAndOnceOnEachRank) {
  const ModelConfig config = model_of();
  const auto model = config.make();
  std::int64_t model_nbytes = 0;
  for (const engine::Parameter* p : parameters_of(*model)) model_nbytes += 4 * p->shape.numel();
  for (const int ranks : {1, 2, 4}) {
    const std::int64_t nbytes = generating_nbytes(config, {.num_ranks = ranks});
    EXPECT_GE(nbytes, (ranks + 1) * model_nbytes);
    EXPECT_LE(nbytes, (ranks + 1) * model_nbytes + ranks * 2 * kMiB) << "a token, and padding";
  }
}

// Parts are there in f32, and in bf16 for those who gather them, as which the whole is half as
// much.
TEST(MemoryNeed, InBf16WhatIsGatheredIsHalf) {
  const ModelConfig config = model_of();
  const auto model = config.make();
  std::int64_t numel = 0;
  for (const engine::Parameter* p : parameters_of(*model)) numel += p->shape.numel();
  for (const int ranks : {1, 2, 4}) {
    const std::int64_t nbytes =
        generating_nbytes(config, {.num_ranks = ranks, .param = engine::DType::kBF16});
    EXPECT_GE(nbytes, (4 + 2 + 2 * ranks) * numel);
    EXPECT_LE(nbytes, (4 + 2 + 2 * ranks) * numel + ranks * 2 * kMiB);
  }
}

TEST(MemoryNeed, HasTheKeysAndValuesOfAllTexts) {
  const ModelConfig config = model_of();
  const std::int64_t of_token = 4 * 2 * config.layers * 3 * 64;  // of all layers
  const auto nbytes = [&](std::int64_t tokens, std::int64_t kept, std::int64_t texts) {
    return generating_nbytes(config, {.num_tokens = tokens, .num_kept = kept, .num_texts = texts});
  };
  EXPECT_GT(nbytes(1001, 1001, 1) - nbytes(1, 1, 1), 1000 * of_token);
  EXPECT_GE(nbytes(1, 1001, 1) - nbytes(1, 1, 1), 1000 * of_token);
  EXPECT_GE(nbytes(1, 1001, 5) - nbytes(1, 1001, 1), 4 * 1000 * of_token);
}

}  // namespace
}  // namespace tessera::tools
