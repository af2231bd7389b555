// The gradient of attention in bf16, whose blocks add to dq by turns, in every order of blocks.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "ops/attention.h"
#include "tests/emulator/control.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

class AttentionOrderTest : public ::testing::Test {
 protected:
  ~AttentionOrderTest() override { cuda_emulation::reset(); }
};

struct Case {
  std::int64_t batch, tokens, heads, kv_heads, head_size;
  bool causal;
  CudaAttention cuda = CudaAttention::kMma;
  std::int64_t document = 0;  // tokens of each but the last of a sample; 0: a row is one
};

OpRun run_in_order(const Case& c, std::uint64_t seed) {
  cuda_emulation::Settings settings = cuda_emulation::settings();
  settings.permutation_seed = seed;
  cuda_emulation::configure(settings);
  const OpCase op{
      .inputs = {{c.batch, c.tokens, (c.heads + 2 * c.kv_heads) * c.head_size}},
      .build = [c](Tape& tape, const auto& x, auto&) {
        Tensor positions;
        if (c.document > 0) {
          std::vector<std::int32_t> at;
          for (std::int64_t i = 0; i < c.batch * c.tokens; ++i)
            at.push_back(static_cast<std::int32_t>(i % c.tokens % c.document));
          positions = Tensor::from<std::int32_t>(tape.memory(), {c.batch, c.tokens}, at);
        }
        return attention(tape, x[0],
                         {.num_heads = c.heads,
                          .num_kv_heads = c.kv_heads,
                          .causal = c.causal,
                          .positions = positions,
                          .cuda = c.cuda});
      }};
  return run_op(op, {.dtype = DType::kBF16, .on_cuda = true});
}

// Several blocks of a head, more heads than are numbered together, and more blocks than are under
// way at a time.
TEST_F(AttentionOrderTest, BitsDoNotDependOnTheOrderOfBlocks) {
  constexpr std::uint64_t kSeeds = 6;
  for (const Case& c :
       {Case{1, 280, 2, 1, 24, true}, Case{1, 260, 1, 1, 40, false}, Case{9, 130, 2, 2, 8, true},
        Case{1, 130, 2, 2, 100, true}, Case{1, 280, 2, 1, 64, true, CudaAttention::kWgmma},
        Case{1, 260, 1, 1, 40, false, CudaAttention::kWgmma},
        Case{9, 130, 2, 2, 64, true, CudaAttention::kWgmma},
        Case{1, 200, 2, 2, 100, true, CudaAttention::kWgmma},
        // That begin in other blocks than the first, and end before the last.
        Case{1, 420, 2, 1, 40, true, CudaAttention::kMma, 190},
        Case{9, 330, 1, 1, 100, true, CudaAttention::kMma, 150},
        Case{1, 420, 2, 1, 40, true, CudaAttention::kWgmma, 190},
        Case{9, 330, 1, 1, 100, true, CudaAttention::kWgmma, 150}}) {
    const OpRun natural = run_in_order(c, 0);
    for (std::uint64_t seed = 1; seed < kSeeds; ++seed)
      EXPECT_EQ(run_in_order(c, seed).grads, natural.grads) << c.tokens << ", seed " << seed;
  }
}

}  // namespace
}  // namespace tessera::ops
