#include "ops/embedding_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/elementwise.h"
#include "ops/embedding_cuda.h"
#include "ops/host_workspace.h"

namespace tessera::ops {

using engine::GradTarget;
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

// Adds the rows of dy into `grad`: row i goes to row_of(i). `cuda` does the same.
template <class RowOf, class Cuda>
void launch_scatter(const Tape& tape, const RowLookup& op, const GradTarget& grad, const Tensor& dy,
                    const std::string& detail, RowOf row_of, Cuda cuda) {
  // At most the rows of dy are read back; a gradient that is assigned is written as a whole.
  const std::int64_t touched = dy.numel() * size_of(grad.dst.dtype());
  const std::int64_t width = grad.dst.dim(1);
  const Tensor sum = host_workspace(tape, {width}, "embedding.sum");
  tape.stream().launch(
      {.name = op.backward,
       .flops = static_cast<double>(dy.numel()),
       .bytes_read = dy.nbytes() + (grad.accumulate ? touched : 0),
       .bytes_written = grad.accumulate ? touched : grad.dst.nbytes(),
       .detail = detail},
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
      cuda);
}

}  // namespace

void check_numbers(const RowLookup& op, const Tensor& numbers, std::int64_t count) {
  const auto all = numbers.span<std::int32_t>();
  for (std::size_t i = 0; i < all.size(); ++i) {
    engine::require(all[i] >= 0 && all[i] < count,
                    "[{}] expected {} in [0, {}), got {} at position {} ({})", op.op, op.number,
                    count, all[i], i, numbers.name());
  }
}

Tensor look_up_rows(Tape& tape, const RowLookup& op, const Tensor& numbers, const Tensor& table,
                    const Tensor& positions) {
  const std::int64_t width = table.dim(1);
  const std::int64_t num_positions = positions.defined() ? numbers.dim(-1) : 0;
  const Tensor y = tape.empty(append(numbers.shape(), width), table.dtype(), op.op);
  tape.stream().launch(
      {.name = op.forward,
       .flops = positions.defined() ? static_cast<double>(y.numel()) : 0,
       .bytes_read = numbers.nbytes() + y.nbytes() + num_positions * width * size_of(y.dtype()),
       .bytes_written = y.nbytes()},
      [=] {
        check_numbers(op, numbers, table.dim(0));
        engine::dispatch_float(y.dtype(), "embedding", [&](auto t) {
          using T = decltype(t);
          look_up(y.data<T>(), numbers.data<std::int32_t>(), numbers.numel(), table.data<T>(),
                  width, positions.defined() ? positions.data<T>() : nullptr, num_positions);
        });
      },
      [=](const auto& stream) { embedding_forward_cuda(stream, y, numbers, table, positions); });
  return y;
}

void launch_row_scatter(const Tape& tape, const RowLookup& op, const GradTarget& grad,
                        const Tensor& dy, const Tensor& numbers, const std::string& detail) {
  launch_scatter(
      tape, op, grad, dy, detail,
      [numbers](std::int64_t i) { return numbers.data<std::int32_t>()[i]; },
      [&](const auto& stream) {
        embedding_backward_cuda(stream, tape.memory(), grad, dy, numbers);
      });
}

void launch_position_scatter(const Tape& tape, const RowLookup& op, const GradTarget& grad,
                             const Tensor& dy, std::int64_t num_tokens, const std::string& detail) {
  launch_scatter(
      tape, op, grad, dy, detail, [num_tokens](std::int64_t i) { return i % num_tokens; },
      [&](const auto& stream) { position_embedding_backward_cuda(stream, grad, dy, num_tokens); });
}

}  // namespace tessera::ops
