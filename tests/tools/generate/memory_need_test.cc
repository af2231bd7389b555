// What ranks that generate hold.
#include "tools/generate/memory_need.h"

#include <gtest/gtest.h>

#include <cstdint>

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
    const std::int64_t nbytes = generating_nbytes(config, ranks, 1);
    EXPECT_GE(nbytes, (ranks + 1) * model_nbytes);
    EXPECT_LE(nbytes, (ranks + 1) * model_nbytes + ranks * 2 * kMiB) << "a token, and padding";
  }
  // Keys and values of a longer prompt, of all layers.
  const std::int64_t more = generating_nbytes(config, 1, 1001) - generating_nbytes(config, 1, 1);
  EXPECT_GT(more, 1000 * 4 * 2 * config.layers * 3 * 64);
}

}  // namespace
}  // namespace tessera::tools
