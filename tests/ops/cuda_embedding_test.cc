// Table lookup on a GPU: the bits of the CPU both ways, whatever the tokens.
#include <cmath>

#include "ops/dropout.h"
#include "ops/embedding.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::Stream;

const CudaBounds kSameBits{.f32 = 0, .bf16 = 0};
using Tokens = std::vector<std::int32_t>;

// `count` tokens below `vocab_size`, small ones often as in text.
Tokens text_like(std::int64_t count, std::int64_t vocab_size) {
  Tokens tokens;
  for (const float v : random_values(count, 77))
    tokens.push_back(static_cast<std::int32_t>(
        std::min(std::exp(2 * std::abs(v)) - 1, static_cast<float>(vocab_size - 1))));
  return tokens;
}

// Makes gradients whose sums depend on their order: those of the harness have so few bits that
// their sums are exact.
Tensor scaled(Tape& tape, const Tensor& y) { return dropout(tape, y, 0.1f, {1, 2}, 0); }

OpCase embedding_case(Tokens tokens, std::int64_t vocab_size, std::int64_t width) {
  return {.parameters = {{vocab_size, width}}, .build = [=](Tape& tape, const auto&, auto& p) {
            const Shape shape{static_cast<std::int64_t>(tokens.size())};
            return scaled(
                tape,
                embedding(tape, Tensor::from<std::int32_t>(tape.memory(), shape, tokens), p[0]));
          }};
}

OpCase token_position_case(Shape shape, std::int64_t vocab_size, std::int64_t width) {
  const Tokens tokens = text_like(shape.numel(), vocab_size);
  return {.parameters = {{vocab_size, width}, {shape.dim(1) + 2, width}},
          .build = [=](Tape& tape, const auto&, auto& p) {
            const Tensor ids = Tensor::from<std::int32_t>(tape.memory(), shape, tokens);
            return scaled(tape, token_position_embedding(tape, ids, p[0], p[1]));
          }};
}

TEST(CudaEmbedding, HasTheBitsOfTheCpu) {
  for (const std::int64_t width : {1, 31, 33, 64, 130})
    check_cuda(embedding_case(text_like(257, 307), 307, width), kSameBits);
  check_cuda(embedding_case({3}, 5, 33), kSameBits);
  check_cuda_run(embedding_case(text_like(31, 307), 307, 1025), {.num_uses = 2}, kSameBits);
}

TEST(CudaEmbedding, PositionsHaveTheBitsOfTheCpu) {
  for (const std::int64_t width : {1, 33, 64})
    check_cuda(token_position_case({3, 31}, 307, width), kSameBits);
  check_cuda(token_position_case({37, 2}, 11, 5), kSameBits);
}

TEST(CudaEmbedding, OneTokenOverAndOverIsSummedInOrder) {
  check_cuda(embedding_case(Tokens(1025, 6), 7, 5), kSameBits);
}

// Whatever lies after the table.
TEST(CudaEmbedding, TheFirstTokenOutsideTheTableIsNan) {
  const Stream stream = Stream::cuda("compute", 0);
  const Memory memory(stream);
  Tape tape(memory, stream);
  Parameter table{.name = "table", .shape = {3, 5}, .trainable = false};
  table.value = to_tensor(memory, {4, 5}, random_values(20, 1), DType::kF32).slice(0, {3, 5});
  const Tensor y = embedding(tape, Tensor::from<std::int32_t>(memory, {2}, Tokens{2, 3}), table);
  const Values values = to_values(y);
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(std::isnan(values[i]), i >= 5) << i;
}

TEST(CudaEmbedding, ATokenOutsideTheTableIsNanAndHasNoGradient) {
  const Tokens tokens{0, -1, 2, 3, 1000000, 2};
  const OpCase op{.parameters = {{3, 5}}, .build = [&](Tape& tape, const auto&, auto& p) {
                    return embedding(tape, Tensor::from<std::int32_t>(tape.memory(), {6}, tokens),
                                     p[0]);
                  }};
  const OpRun run = run_op(op, {.on_cuda = true});
  Values grad(3 * 5, 0);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool known = tokens[i] >= 0 && tokens[i] < 3;
    for (std::size_t c = 0; c < 5; ++c) {
      EXPECT_EQ(std::isnan(run.y[i * 5 + c]), !known);
      if (known) grad[static_cast<std::size_t>(tokens[i]) * 5 + c] += run.dy[i * 5 + c];
    }
  }
  expect_close(run.grads[0], grad, 1e-6, "gradient");
}

}  // namespace
}  // namespace tessera::ops
