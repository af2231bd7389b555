#include "ops/embedding.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/elementwise.h"
#include "ops/embedding_cuda.h"
#include "ops/host_workspace.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::Parameter;
using engine::Shape;
using engine::store_f32;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

Shape append(const Shape& shape, std::int64_t dim) {
  std::vector<std::int64_t> dims(shape.dims().begin(), shape.dims().end());
  dims.push_back(dim);
  return Shape(dims);
}

void check_table(const Tensor& tokens, const Tensor& table) {
  engine::require(tokens.dtype() == DType::kI32, "[embedding] expected tokens i32, got {} ({})",
                  name_of(tokens.dtype()), tokens.name());
  engine::require(table.shape().rank() == 2, "[embedding] expected a table (V, C), got {} ({})",
                  table.shape(), table.name());
}

void check_tokens(const Tensor& tokens, std::int64_t vocab_size) {
  const auto all = tokens.span<std::int32_t>();
  for (std::size_t i = 0; i < all.size(); ++i) {
    engine::require(all[i] >= 0 && all[i] < vocab_size,
                    "[embedding] expected a token in [0, {}), got {} at position {} ({})",
                    vocab_size, all[i], i, tokens.name());
  }
}

// y[i] = table[tokens[i]], plus positions[i % T] if there are any.
template <class T>
void look_up(T* y, const std::int32_t* tokens, std::int64_t num_tokens, const T* table,
             std::int64_t width, const T* positions, std::int64_t num_positions) {
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    const T* row = table + tokens[i] * width;
    if (positions == nullptr) {
      std::memcpy(y + i * width, row, static_cast<std::size_t>(width) * sizeof(T));
      continue;
    }
    const T* position = positions + i % num_positions * width;
    for (std::int64_t c = 0; c < width; ++c)
      store_f32(y[i * width + c], to_f32(row[c]) + to_f32(position[c]));
  }
}

// Which row of dy goes to which row of the table, ordered by table row and then by row of dy.
struct Scatter {
  std::int64_t table_row, dy_row;
  // NOLINTNEXTLINE(modernize-use-nullptr): there is no null
  friend auto operator<=>(const Scatter&, const Scatter&) = default;
};

// Sums each table row of `grad` over its rows of dy in f32, then stores it: one rounding, whatever
// the dtype.
template <class G, class T>
void scatter_add(G* grad, std::int64_t width, const T* dy, std::vector<Scatter> order, float* sum) {
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < order.size();) {
    const std::int64_t row = order[i].table_row;
    engine::cast(sum, grad + row * width, width);
    for (; i < order.size() && order[i].table_row == row; ++i)
      engine::add(sum, dy + order[i].dy_row * width, width);
    engine::cast(grad + row * width, sum, width);
  }
}

// Adds the rows of dy into the gradient of `table`: row i goes to row_of(i). `cuda` does the same.
template <class RowOf, class Cuda>
void launch_scatter(Tape& tape, Parameter& table, const Tensor& dy, RowOf row_of, Cuda cuda) {
  const GradTarget grad = tape.grad_target(table);
  if (!grad) return;
  // At most the rows of dy are read back; a gradient that is assigned is written as a whole.
  const std::int64_t touched = dy.numel() * size_of(grad.dst.dtype());
  const std::int64_t width = grad.dst.dim(1);
  const Tensor sum = host_workspace(tape, {width}, "embedding.sum");
  tape.stream().launch(
      {.name = "embedding.backward",
       .flops = static_cast<double>(dy.numel()),
       .bytes_read = dy.nbytes() + (grad.accumulate ? touched : 0),
       .bytes_written = grad.accumulate ? touched : grad.dst.nbytes(),
       .detail = table.name},
      [=] {
        if (!grad.accumulate) engine::fill_zero(grad.dst);
        std::vector<Scatter> order(static_cast<std::size_t>(dy.shape().rows()));
        for (std::size_t i = 0; i < order.size(); ++i)
          order[i] = {row_of(static_cast<std::int64_t>(i)), static_cast<std::int64_t>(i)};
        engine::dispatch_float(grad.dst.dtype(), "embedding", [&](auto g) {
          engine::dispatch_float(dy.dtype(), "embedding", [&](auto t) {
            scatter_add(grad.dst.data<decltype(g)>(), width, dy.data<decltype(t)>(),
                        std::move(order), sum.data<float>());
          });
        });
      },
      [&](const auto& stream) { cuda(stream, grad); });
}

// Row i of dy goes to the row of its token.
void launch_token_scatter(Tape& tape, Parameter& table, const Tensor& dy, const Tensor& tokens) {
  launch_scatter(
      tape, table, dy, [tokens](std::int64_t i) { return tokens.data<std::int32_t>()[i]; },
      [&](const auto& stream, const GradTarget& grad) {
        embedding_backward_cuda(stream, tape.memory(), grad, dy, tokens);
      });
}

// Row i of dy goes to row i % num_tokens.
void launch_position_scatter(Tape& tape, Parameter& table, const Tensor& dy,
                             std::int64_t num_tokens) {
  launch_scatter(
      tape, table, dy, [num_tokens](std::int64_t i) { return i % num_tokens; },
      [&](const auto& stream, const GradTarget& grad) {
        position_embedding_backward_cuda(stream, grad, dy, num_tokens);
      });
}

// `positions` may be undefined.
Tensor forward(Tape& tape, const Tensor& tokens, const Tensor& table, const Tensor& positions) {
  const std::int64_t vocab_size = table.dim(0), width = table.dim(1);
  const std::int64_t num_positions = positions.defined() ? tokens.dim(-1) : 0;
  const Tensor y = tape.empty(append(tokens.shape(), width), table.dtype(), "embedding");
  tape.stream().launch(
      {.name = "embedding.forward",
       .flops = positions.defined() ? static_cast<double>(y.numel()) : 0,
       .bytes_read = tokens.nbytes() + y.nbytes() + num_positions * width * size_of(y.dtype()),
       .bytes_written = y.nbytes()},
      [=] {
        check_tokens(tokens, vocab_size);
        engine::dispatch_float(y.dtype(), "embedding", [&](auto t) {
          using T = decltype(t);
          look_up(y.data<T>(), tokens.data<std::int32_t>(), tokens.numel(), table.data<T>(), width,
                  positions.defined() ? positions.data<T>() : nullptr, num_positions);
        });
      },
      [=](const auto& stream) { embedding_forward_cuda(stream, y, tokens, table, positions); });
  return y;
}

}  // namespace

Tensor embedding(Tape& tape, const Tensor& tokens, Parameter& table) {
  const Tensor value = tape.use(table);
  check_table(tokens, value);
  const Tensor y = forward(tape, tokens, value, {});
  if (!tape.needs_grad(table)) return y;
  tape.record("embedding", y, [&tape, &table, tokens](const Tensor& dy) {
    launch_token_scatter(tape, table, dy, tokens);
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
  const Tensor y = forward(tape, tokens, table, positions);
  const bool wants_wte = tape.needs_grad(wte), wants_wpe = tape.needs_grad(wpe);
  if (!wants_wte && !wants_wpe) return y;
  tape.record("token_position_embedding", y,
              [&tape, &wte, &wpe, tokens, num_tokens](const Tensor& dy) {
                launch_token_scatter(tape, wte, dy, tokens);
                launch_position_scatter(tape, wpe, dy, num_tokens);
              });
  return y;
}

}  // namespace tessera::ops
