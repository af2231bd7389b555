#include "ops/dims/slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>

#include "engine/elementwise.h"
#include "ops/dims/dim.h"
#include "ops/dims/strided_copy.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Shape;
using engine::Tape;
using engine::Tensor;

namespace {

// `part` and the place of it in `whole`, from `begin` on in dimension `dim`.
struct Part {
  Box part;
  Box place;
};

Part part_of(const Tensor& part, const Tensor& whole, const Dim& dim, std::int64_t begin) {
  return {.part = {part, 0, strides_of(part.shape())},
          .place = {whole, begin * dim.inner, strides_of(whole.shape())}};
}

void launch_copy(const Tape& tape, std::string_view name, const Shape& shape, const Box& to,
                 const Box& from, bool accumulate) {
  StridedCopy copy{.rank = shape.rank(), .to = to, .from = from, .accumulate = accumulate};
  std::copy(shape.dims().begin(), shape.dims().end(), copy.dims.begin());
  launch_strided_copy(tape.stream(), name, copy);
}

void require_float(const Tensor& x, std::string_view op) {
  engine::dispatch_float(x.dtype(), op, [](auto) {});
}

}  // namespace

std::vector<Tensor> split(Tape& tape, const Tensor& x, int dim,
                          const std::vector<std::int64_t>& counts) {
  const Dim d = dim_of(x, dim, "split");
  require_float(x, "split");
  const bool are_counts = std::ranges::all_of(counts, [](std::int64_t n) { return n >= 0; });
  engine::require(
      are_counts && std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == d.numel,
      "[split] expected parts that add up to {}, dimension {} of {}, got {} ({})", d.numel, d.index,
      x.shape(), fmt::join(counts, " + "), x.name());
  const bool wants_dx = tape.needs_grad(x);
  std::vector<Tensor> parts;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    const Tensor y = tape.empty(with_dim(x.shape(), d.index, count), x.dtype(), "split");
    const Part p = part_of(y, x, d, begin);
    launch_copy(tape, "split.forward", y.shape(), p.part, p.place, false);
    parts.push_back(y);
    begin += count;
  }
  if (!wants_dx) return parts;
  tape.record(
      "split", parts, [&tape, x = x.without_data(), d, counts](const std::vector<Tensor>& dys) {
        const GradTarget dx = tape.grad_target(x);
        if (!dx) return;
        const bool are_all = std::ranges::all_of(dys, &Tensor::defined);
        if (!dx.accumulate && !are_all) engine::launch_set(tape.stream(), dx.dst, 0, "split.zero");
        std::int64_t at = 0;
        for (std::size_t i = 0; i < dys.size(); at += counts[i++]) {
          if (!dys[i].defined()) continue;
          const Part p = part_of(dys[i], dx.dst, d, at);
          launch_copy(tape, "split.backward", dys[i].shape(), p.place, p.part, dx.accumulate);
        }
      });
  return parts;
}

Tensor slice(Tape& tape, const Tensor& x, int dim, std::int64_t begin, std::int64_t count) {
  const Dim d = dim_of(x, dim, "slice");
  require_float(x, "slice");
  engine::require(begin >= 0 && count >= 0 && begin <= d.numel - count,
                  "[slice] expected a part of the {} in dimension {} of {}, got {} from {} on ({})",
                  d.numel, d.index, x.shape(), count, begin, x.name());
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(with_dim(x.shape(), d.index, count), x.dtype(), "slice");
  const Part p = part_of(y, x, d, begin);
  launch_copy(tape, "slice.forward", y.shape(), p.part, p.place, false);
  if (!wants_dx) return y;
  tape.record("slice", y, [&tape, x = x.without_data(), d, begin](const Tensor& dy) {
    const GradTarget dx = tape.grad_target(x);
    if (!dx) return;
    if (!dx.accumulate) engine::launch_set(tape.stream(), dx.dst, 0, "slice.zero");
    const Part at = part_of(dy, dx.dst, d, begin);
    launch_copy(tape, "slice.backward", dy.shape(), at.place, at.part, dx.accumulate);
  });
  return y;
}

Tensor concat(Tape& tape, const std::vector<Tensor>& xs, int dim) {
  engine::require(!xs.empty(), "[concat] expected at least one tensor, got none");
  const Dim d = dim_of(xs[0], dim, "concat");
  require_float(xs[0], "concat");
  std::int64_t numel = 0;
  bool wants_dx = false;
  for (const Tensor& x : xs) {
    const bool fits = x.shape().rank() == xs[0].shape().rank() &&
                      with_dim(x.shape(), d.index, d.numel) == xs[0].shape() &&
                      x.dtype() == xs[0].dtype();
    engine::require(fits, "[concat] expected {} {} but for dimension {}, got {} {} ({}, {})",
                    name_of(xs[0].dtype()), xs[0].shape(), d.index, name_of(x.dtype()), x.shape(),
                    xs[0].name(), x.name());
    numel += x.dim(d.index);
    wants_dx = tape.needs_grad(x) || wants_dx;
  }
  const Tensor y = tape.empty(with_dim(xs[0].shape(), d.index, numel), xs[0].dtype(), "concat");
  std::vector<Tensor> names;
  std::int64_t begin = 0;
  for (const Tensor& x : xs) {
    const Part p = part_of(x, y, d, begin);
    launch_copy(tape, "concat.forward", x.shape(), p.place, p.part, false);
    names.push_back(x.without_data());
    begin += x.dim(d.index);
  }
  if (!wants_dx) return y;
  tape.record("concat", y, [&tape, names, d](const Tensor& dy) {
    std::int64_t at = 0;
    for (const Tensor& x : names) {
      if (const GradTarget dx = tape.grad_target(x)) {
        const Part p = part_of(dx.dst, dy, d, at);
        launch_copy(tape, "concat.backward", x.shape(), p.part, p.place, dx.accumulate);
      }
      at += x.dim(d.index);
    }
  });
  return y;
}

}  // namespace tessera::ops
