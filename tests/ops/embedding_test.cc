// Table lookup: values, gradients in token order with one rounding, and tokens that are refused.
#include "ops/embedding.h"

#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Stream;

using Tokens = std::vector<std::int32_t>;

Tensor to_tokens(const Memory& memory, const Shape& shape, const Tokens& values) {
  return Tensor::from<std::int32_t>(memory, shape, values, "tokens");
}

// 3 rows of 4 tokens out of 11, most of them repeated.
const Tokens kTokens = {3, 0, 10, 3, 3, 7, 0, 3, 1, 10, 3, 3};

OpCase embedding_case() {
  return {.parameters = {{11, 5}}, .build = [](Tape& tape, const auto&, auto& p) {
            return embedding(tape, to_tokens(tape.memory(), {3, 4}, kTokens), p[0]);
          }};
}

OpCase token_position_case() {
  return {.parameters = {{11, 5}, {6, 5}}, .build = [](Tape& tape, const auto&, auto& p) {
            return token_position_embedding(tape, to_tokens(tape.memory(), {3, 4}, kTokens), p[0],
                                            p[1]);
          }};
}

TEST(EmbeddingTest, LooksUpRowsAndAddsTheirGradientsInTokenOrder) {
  const OpRun run = run_op(embedding_case());
  std::vector<float> grad(11 * 5, 0.0f);
  for (std::size_t i = 0; i < kTokens.size(); ++i) {
    for (std::size_t c = 0; c < 5; ++c) {
      const std::size_t at = static_cast<std::size_t>(kTokens[i]) * 5 + c;
      ASSERT_EQ(run.y[i * 5 + c], run.leaves[0][at]);
      grad[at] += static_cast<float>(run.dy[i * 5 + c]);
    }
  }
  EXPECT_EQ(run.grads[0], Values(grad.begin(), grad.end()));  // rows without a token are zero
}

TEST(EmbeddingTest, AddsPositions) {
  const OpRun run = run_op(token_position_case());
  std::vector<float> dwte(11 * 5, 0.0f), dwpe(6 * 5, 0.0f);
  for (std::size_t i = 0; i < kTokens.size(); ++i) {
    for (std::size_t c = 0; c < 5; ++c) {
      const std::size_t te = static_cast<std::size_t>(kTokens[i]) * 5 + c, pe = i % 4 * 5 + c;
      ASSERT_EQ(run.y[i * 5 + c],
                static_cast<float>(run.leaves[0][te]) + static_cast<float>(run.leaves[1][pe]));
      dwte[te] += static_cast<float>(run.dy[i * 5 + c]);
      dwpe[pe] += static_cast<float>(run.dy[i * 5 + c]);
    }
  }
  EXPECT_EQ(run.grads[0], Values(dwte.begin(), dwte.end()));
  EXPECT_EQ(run.grads[1], Values(dwpe.begin(), dwpe.end()));
}

// 12 rows of 5 out of 11. A gradient that is assigned is written as a whole; of one that is added
// to no more than the rows that are looked up is read and written.
TEST(EmbeddingTest, StatesItsWork) {
  LastWorks works;
  run_op(token_position_case(), {.listener = &works});
  works.expect("embedding.forward", 60, 48 + 240 + 80, 240);
  run_op(embedding_case(), {.listener = &works});
  works.expect("embedding.forward", 0, 48 + 240, 240);
  works.expect("embedding.backward", 60, 240, 220);
  run_op(embedding_case(), {.num_uses = 2, .listener = &works});
  works.expect("embedding.backward", 60, 240 + 240, 240);
}

TEST(EmbeddingTest, GradientsMatchDifferences) {
  check_gradients(embedding_case());
  check_gradients(token_position_case());
}

TEST(EmbeddingTest, BFloat16MatchesF32) {
  check_bf16(embedding_case());
  check_bf16(token_position_case());
}

// The gradient of row 1 of a table (3, 1) whose row 1 is looked up once for each element of `dy`,
// with row 2 in between.
double summed_gradient(const std::vector<float>& dy, DType dtype) {
  const Memory memory({.poison = true});
  Tape tape(memory, Stream::inline_cpu("compute"));
  engine::Parameter table{.name = "wte", .shape = {3, 1}};
  engine::materialize({&table}, memory, 1, dtype, dtype);
  Tokens tokens;
  std::vector<float> all_dy;
  for (const float d : dy) {
    tokens.insert(tokens.end(), {1, 2});
    all_dy.insert(all_dy.end(), {d, 1});
  }
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  const Tensor y = embedding(tape, to_tokens(memory, {num_tokens}, tokens), table);
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("loss", loss, [&](const Tensor&) {
    tape.pass_grad(y, to_tensor(memory, {num_tokens, 1}, all_dy, dtype));
  });
  tape.backward(loss);
  EXPECT_EQ(to_values(table.grad)[0], 0);
  return to_values(table.grad)[1];
}

TEST(EmbeddingTest, AddsInTokenOrder) {
  EXPECT_EQ(summed_gradient({0x1p30f, 1, -0x1p30f, 1}, DType::kF32), 1);
  EXPECT_EQ(summed_gradient({1, 0x1p30f, 1, -0x1p30f}, DType::kF32), 0);
}

TEST(EmbeddingTest, BFloat16GradientIsRoundedOnce) {
  // Rounded at each addition it would stay 1: each addend is half a unit.
  std::vector<float> dy(65, 0x1p-8f);
  dy[0] = 1;
  EXPECT_EQ(summed_gradient(dy, DType::kBF16), 1.25);
}

TEST(EmbeddingTest, FrozenTableIsNotRecorded) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  engine::Parameter table{.name = "wte", .shape = {2, 1}, .trainable = false};
  engine::materialize({&table}, memory, 1);
  const Tensor y = embedding(tape, to_tokens(memory, {3}, {0, 1, 0}), table);
  EXPECT_EQ(tape.num_entries(), 0u);
  EXPECT_FALSE(tape.needs_grad(y));
}

TEST(EmbeddingTest, RefusedTokenIsNamed) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  engine::Parameter table{.name = "wte", .shape = {11, 5}},
      positions{.name = "wpe", .shape = {6, 5}};
  engine::materialize({&table, &positions}, memory, 1);
  for (const std::int32_t token : {-1, 11, 50256}) {
    const Tensor tokens = to_tokens(memory, {2, 2}, {0, 1, token, 2});
    try {
      token_position_embedding(tape, tokens, table, positions);
      FAIL() << "expected InvalidArgument";
    } catch (const InvalidArgument& e) {
      EXPECT_EQ(std::string(e.what()), "[embedding] expected a token in [0, 11), got " +
                                           std::to_string(token) + " at position 2 (tokens)");
    }
    EXPECT_THROW(embedding(tape, tokens, table), InvalidArgument);
  }
}

TEST(EmbeddingTest, RefusesShapesThatDoNotFit) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  engine::Parameter table{.name = "wte", .shape = {11, 5}}, few{.name = "wpe", .shape = {3, 5}},
      narrow{.name = "wpe", .shape = {6, 4}}, flat{.name = "flat", .shape = {11}};
  engine::materialize({&table, &few, &narrow, &flat}, memory, 1);
  const Tensor tokens = to_tokens(memory, {3, 4}, kTokens);
  EXPECT_THROW(token_position_embedding(tape, tokens, table, few), InvalidArgument);
  EXPECT_THROW(token_position_embedding(tape, tokens, table, narrow), InvalidArgument);
  EXPECT_THROW(token_position_embedding(tape, tokens.reshape({12}), table, few), InvalidArgument);
  EXPECT_THROW(embedding(tape, tokens, flat), InvalidArgument);
  EXPECT_THROW(embedding(tape, Tensor::zeros(memory, {3}, DType::kF32), table), InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops
