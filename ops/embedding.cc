#include "ops/embedding.h"

#include "ops/embedding_rows.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::Parameter;
using engine::Tape;
using engine::Tensor;

namespace {

constexpr RowLookup kEmbedding{"embedding", "a token", "embedding.forward", "embedding.backward"};

void check_table(const Tensor& tokens, const Tensor& table) {
  engine::require(tokens.dtype() == DType::kI32, "[embedding] expected tokens i32, got {} ({})",
                  name_of(tokens.dtype()), tokens.name());
  engine::require(table.shape().rank() == 2, "[embedding] expected a table (V, C), got {} ({})",
                  table.shape(), table.name());
}

}  // namespace

Tensor embedding(Tape& tape, const Tensor& tokens, Parameter& table) {
  const Tensor value = tape.use(table);
  check_table(tokens, value);
  const Tensor y = look_up_rows(tape, kEmbedding, tokens, value);
  if (!tape.needs_grad(table)) return y;
  tape.record("embedding", y, [&tape, &table, tokens](const Tensor& dy) {
    if (const GradTarget grad = tape.grad_target(table))
      launch_row_scatter(tape, kEmbedding, grad, dy, tokens, table.name);
  });
  return y;
}

Tensor token_position_embedding(Tape& tape, const Tensor& tokens, Parameter& wte, Parameter& wpe) {
  const Tensor table = tape.use(wte), positions = tape.use(wpe);
  check_table(tokens, table);
  check_table(tokens, positions);
  engine::require(tokens.shape().rank() == 2, "[embedding] expected tokens (B, T), got {} ({})",
                  tokens.shape(), tokens.name());
  engine::require(positions.dtype() == table.dtype() && positions.dim(1) == table.dim(1),
                  "[embedding] expected positions {} of {}, got {} {} ({})", name_of(table.dtype()),
                  table.dim(1), name_of(positions.dtype()), positions.shape(), wpe.name);
  const std::int64_t num_tokens = tokens.dim(1);
  engine::require(num_tokens <= positions.dim(0),
                  "[embedding] expected at most {} tokens in a row, got {} ({})", positions.dim(0),
                  num_tokens, wpe.name);
  const Tensor y = look_up_rows(tape, kEmbedding, tokens, table, positions);
  const bool wants_wte = tape.needs_grad(wte), wants_wpe = tape.needs_grad(wpe);
  if (!wants_wte && !wants_wpe) return y;
  tape.record("token_position_embedding", y,
              [&tape, &wte, &wpe, tokens, num_tokens](const Tensor& dy) {
                if (const GradTarget grad = tape.grad_target(wte))
                  launch_row_scatter(tape, kEmbedding, grad, dy, tokens, wte.name);
                if (const GradTarget grad = tape.grad_target(wpe))
                  launch_position_scatter(tape, kEmbedding, grad, dy, num_tokens, wpe.name);
              });
  return y;
}

}  // namespace tessera::ops
