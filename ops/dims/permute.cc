#include "ops/dims/permute.h"

#include <fmt/format.h>

#include <cstddef>
#include <numeric>
#include <span>
#include <utility>

#include "ops/dims/dim.h"
#include "ops/dims/strided_copy.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Shape;
using engine::Tape;
using engine::Tensor;

namespace {

// `permuted` has the dimensions of `x` in the order `dims`: the copy of one to the other.
StridedCopy copy_of(const Tensor& permuted, const Tensor& x, const std::vector<int>& dims) {
  const BoxDims strides = strides_of(x.shape());
  StridedCopy copy{.rank = x.shape().rank(),
                   .to = {permuted, 0, strides_of(permuted.shape())},
                   .from = {x, 0, {}}};
  for (std::size_t k = 0; k < dims.size(); ++k) {
    copy.dims[k] = x.dim(dims[k]);
    copy.from.strides[k] = strides[static_cast<std::size_t>(dims[k])];
  }
  return copy;
}

Tensor permute(Tape& tape, const Tensor& x, const std::vector<int>& dims, std::string_view op) {
  engine::dispatch_float(x.dtype(), op, [](auto) {});
  const bool wants_dx = tape.needs_grad(x);
  std::vector<std::int64_t> shape;
  for (const int dim : dims) shape.push_back(x.dim(dim));
  const Tensor y = tape.empty(Shape(std::span<const std::int64_t>(shape)), x.dtype(), op);
  launch_strided_copy(tape.stream(), "permute.forward", copy_of(y, x, dims));
  if (!wants_dx) return y;
  tape.record(op, y, [&tape, x = x.without_data(), dims](const Tensor& dy) {
    const GradTarget dx = tape.grad_target(x);
    if (!dx) return;
    StridedCopy copy = copy_of(dy, dx.dst, dims);
    std::swap(copy.to, copy.from);
    copy.accumulate = dx.accumulate;
    launch_strided_copy(tape.stream(), "permute.backward", copy);
  });
  return y;
}

}  // namespace

Tensor permute(Tape& tape, const Tensor& x, const std::vector<int>& dims) {
  std::vector<int> order;
  std::vector<bool> is_taken(static_cast<std::size_t>(x.shape().rank()), false);
  for (const int dim : dims) {
    order.push_back(dim_of(x, dim, "permute").index);
    is_taken[static_cast<std::size_t>(order.back())] = true;
  }
  const bool is_order =
      order.size() == is_taken.size() &&
      std::accumulate(is_taken.begin(), is_taken.end(), 0) == static_cast<int>(order.size());
  engine::require(is_order, "[permute] expected each dimension of {} once, got {} ({})", x.shape(),
                  fmt::join(dims, ", "), x.name());
  return permute(tape, x, order, "permute");
}

Tensor transpose(Tape& tape, const Tensor& x, int a, int b) {
  const Dim first = dim_of(x, a, "transpose"), second = dim_of(x, b, "transpose");
  std::vector<int> dims(static_cast<std::size_t>(x.shape().rank()));
  std::iota(dims.begin(), dims.end(), 0);
  std::swap(dims[static_cast<std::size_t>(first.index)],
            dims[static_cast<std::size_t>(second.index)]);
  return permute(tape, x, dims, "transpose");
}

}  // namespace tessera::ops
