#include "ops/dims/broadcast.h"

#include <algorithm>
#include <vector>

#include "ops/dims/reduce_cuda.h"
#include "ops/dims/strided_copy.h"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Shape;
using engine::Tape;
using engine::Tensor;

namespace {

// What is summed to undo the repetition: runs of neighbouring dimensions, the last first, so that
// the dimensions before a run are those of `shape`.
std::vector<Dim> runs_of(const Shape& x, const Shape& shape) {
  std::vector<Dim> runs;
  std::int64_t inner = 1;
  const int added = shape.rank() - x.rank();
  bool was_repeated = false;
  for (int k = shape.rank() - 1; k >= 0; --k) {
    const std::int64_t numel = shape.dim(k);
    if (numel == 1) continue;  // of neither kind
    const bool is_repeated = k < added || x.dim(k - added) == 1;
    if (!is_repeated) {
      inner *= numel;
    } else if (was_repeated) {
      runs.back().numel *= numel;
    } else {
      runs.push_back({.index = k, .outer = 1, .numel = numel, .inner = inner});
    }
    if (is_repeated) runs.back().index = k;
    was_repeated = is_repeated;
  }
  for (Dim& run : runs)
    for (int k = 0; k < run.index; ++k) run.outer *= shape.dim(k);
  return runs;
}

void launch_backward(const Tape& tape, const GradTarget& dx, Tensor dy,
                     const std::vector<Dim>& runs) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    GradTarget out = dx;
    if (i + 1 < runs.size())
      out = {Tensor::empty(tape.memory(), {runs[i].outer, runs[i].inner}, DType::kF32,
                           "broadcast.sums", Category::kWorkspace)};
    launch_dim_sum(tape.stream(), "broadcast.backward", {out, dy, runs[i]});
    dy = out.dst;
  }
}

}  // namespace

Tensor broadcast(Tape& tape, const Tensor& x, const Shape& shape) {
  engine::dispatch_float(x.dtype(), "broadcast", [](auto) {});
  const int added = shape.rank() - x.shape().rank();
  bool fits = added >= 0;
  for (int k = 0; fits && k < x.shape().rank(); ++k)
    fits = x.dim(k) == 1 || x.dim(k) == shape.dim(k + added);
  engine::require(fits, "[broadcast] expected dimensions of 1 or of {}, got {} ({})", shape,
                  x.shape(), x.name());
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(shape, x.dtype(), "broadcast");
  StridedCopy copy{.rank = shape.rank(), .to = {y, 0, strides_of(shape)}, .from = {x, 0, {}}};
  std::copy(shape.dims().begin(), shape.dims().end(), copy.dims.begin());
  const BoxDims strides = strides_of(x.shape());
  for (int k = 0; k < x.shape().rank(); ++k) {
    const auto at = static_cast<std::size_t>(k);
    if (x.dim(k) != 1) copy.from.strides[at + static_cast<std::size_t>(added)] = strides[at];
  }
  launch_strided_copy(tape.stream(), "broadcast.forward", copy);
  if (!wants_dx) return y;
  tape.record("broadcast", y,
              [&tape, x = x.without_data(), runs = runs_of(x.shape(), shape)](const Tensor& dy) {
                if (runs.empty()) return tape.pass_grad(x, dy);
                if (const GradTarget dx = tape.grad_target(x)) launch_backward(tape, dx, dy, runs);
              });
  return y;
}

}  // namespace tessera::ops
