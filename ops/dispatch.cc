#include "ops/dispatch.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <unordered_set>

#include "engine/elementwise.h"
#include "ops/dispatch_cuda.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::require;
using engine::store_f32;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

template <class T>
ExpertRows<T> rows_of(const std::vector<GradTarget>& buffers, const Tensor& slots,
                      std::int64_t rows, std::int64_t width) {
  ExpertRows<T> all{.rows = rows,
                    .width = width,
                    .num_tokens = slots.dim(0),
                    .k = slots.dim(1),
                    .slots = slots.data<std::int32_t>()};
  for (std::size_t b = 0; b < buffers.size(); ++b) {
    if (!buffers[b]) continue;
    all.buffers[b] = buffers[b].dst.data<T>();
    all.accumulate[b] = buffers[b].accumulate;
  }
  return all;
}

std::vector<GradTarget> as_targets(const std::vector<Tensor>& tensors) {
  std::vector<GradTarget> all;
  for (const Tensor& t : tensors) all.push_back({t});
  return all;
}

// buffers = or += x by row, times the gates unless these are undefined; other rows are zero.
void launch_scatter(const Stream& stream, std::string_view name,
                    const std::vector<GradTarget>& buffers, std::int64_t rows, const Tensor& x,
                    const Tensor& gates, const Tensor& slots) {
  for (const GradTarget& b : buffers) {
    if (b && !b.accumulate) engine::launch_fill(stream, b.dst, 0, "dispatch.clear");
  }
  const float* g = gates.defined() ? gates.data<float>() : nullptr;
  engine::dispatch_float(x.dtype(), "dispatch", [&](auto t) {
    using T = decltype(t);
    const T* src = x.data<T>();
    const auto all = rows_of<T>(buffers, slots, rows, x.dim(1));
    stream.launch(
        {.name = name,
         .flops = g == nullptr ? 0 : static_cast<double>(slots.numel() * x.dim(1)),
         .bytes_read = x.nbytes(),
         .bytes_written = slots.numel() * x.dim(1) * size_of(x.dtype())},
        [=, keep = std::tuple(buffers, x, gates, slots)] {
          for (std::int64_t i = 0; i < all.num_tokens * all.k; ++i) {
            require(all.slots[i] < std::ssize(buffers) * all.rows,
                    "[dispatch] expected slots below {} x {}, got {}", buffers.size(), all.rows,
                    all.slots[i]);
            for (std::int64_t c = 0; c < all.width; ++c)
              all.write(i, c, to_f32(src[i / all.k * all.width + c]) * (g == nullptr ? 1 : g[i]));
          }
        },
        [&](const auto& cuda) { scatter_rows_cuda(cuda, all, src, g); });
  });
}

// y = or += the sum of a token's rows, times the gates unless these are undefined.
void launch_gather(const Stream& stream, std::string_view name, const GradTarget& y,
                   const std::vector<Tensor>& buffers, std::int64_t rows, const Tensor& gates,
                   const Tensor& slots) {
  const float* g = gates.defined() ? gates.data<float>() : nullptr;
  engine::dispatch_float(y.dst.dtype(), "combine", [&](auto t) {
    using T = decltype(t);
    T* dst = y.dst.data<T>();
    const auto all = rows_of<T>(as_targets(buffers), slots, rows, y.dst.dim(1));
    stream.launch(
        {.name = name,
         .flops = 2.0 * static_cast<double>(slots.numel() * all.width),
         .bytes_read = slots.numel() * all.width * size_of(y.dst.dtype()),
         .bytes_written = y.dst.nbytes()},
        [=, keep = std::tuple(y, buffers, gates, slots)] {
          for (std::int64_t n = 0; n < all.num_tokens; ++n) {
            for (std::int64_t c = 0; c < all.width; ++c) {
              T& to = dst[n * all.width + c];
              const float value = all.sum(g, n, c);
              store_f32(to, y.accumulate ? to_f32(to) + value : value);
            }
          }
        },
        [&](const auto& cuda) { gather_rows_cuda(cuda, all, dst, g, y.accumulate); });
  });
}

void launch_dots(const Stream& stream, const GradTarget& dgates, const std::vector<Tensor>& buffers,
                 std::int64_t rows, const Tensor& dy, const Tensor& slots) {
  engine::dispatch_float(dy.dtype(), "combine", [&](auto t) {
    using T = decltype(t);
    const T* d = dy.data<T>();
    const auto all = rows_of<T>(as_targets(buffers), slots, rows, dy.dim(1));
    stream.launch(
        {.name = "combine.backward_gates",
         .flops = 2.0 * static_cast<double>(slots.numel() * all.width),
         .bytes_read = dy.nbytes() + slots.numel() * all.width * size_of(dy.dtype()),
         .bytes_written = dgates.dst.nbytes()},
        [=, keep = std::tuple(buffers, dy, slots)] {
          for (std::int64_t i = 0; i < all.num_tokens * all.k; ++i) {
            float& to = dgates.dst.data<float>()[i];
            to = dgates.accumulate ? to + all.dot(d, i) : all.dot(d, i);
          }
        },
        [&](const auto& cuda) {
          dot_rows_cuda(cuda, all, d, dgates.dst.data<float>(), dgates.accumulate);
        });
  });
}

void check_slots(std::string_view op, const Tensor& slots, std::int64_t num_tokens,
                 std::size_t num_buffers) {
  require(slots.dtype() == DType::kI32 && slots.shape().rank() == 2 && slots.dim(0) == num_tokens,
          "[{}] expected slots ({}, k) i32, got {} {} ({})", op, num_tokens, slots.shape(),
          name_of(slots.dtype()), slots.name());
  require(num_buffers >= 1 && num_buffers <= kMaxExpertBuffers,
          "[{}] expected 1 to {} buffers, got {}", op, kMaxExpertBuffers, num_buffers);
}

}  // namespace

std::vector<Tensor> dispatch(Tape& tape, const Tensor& x, const Tensor& slots,
                             std::int64_t num_buffers, std::int64_t rows) {
  require(x.shape().rank() == 2, "[dispatch] expected x (tokens, channels), got {} ({})", x.shape(),
          x.name());
  check_slots("dispatch", slots, x.dim(0), static_cast<std::size_t>(num_buffers));
  require(rows >= 1, "[dispatch] expected at least 1 row, got {}", rows);
  std::vector<Tensor> buffers;
  for (std::int64_t b = 0; b < num_buffers; ++b)
    buffers.push_back(tape.empty({rows, x.dim(1)}, x.dtype(), "dispatch"));
  launch_scatter(tape.stream(), "dispatch.forward", as_targets(buffers), rows, x, {}, slots);
  if (!tape.needs_grad(x)) return buffers;
  tape.record("dispatch", buffers,
              [&tape, x = x.without_data(), slots, rows](const std::vector<Tensor>& d) {
                if (const GradTarget dx = tape.grad_target(x))
                  launch_gather(tape.stream(), "dispatch.backward", dx, d, rows, {}, slots);
              });
  return buffers;
}

namespace {

// Backward scatters to the gradients of all at once.
void check_differ(const std::vector<Tensor>& buffers) {
  std::unordered_set<engine::TensorKey, engine::TensorKeyHash> seen;
  for (const Tensor& b : buffers) {
    require(seen.insert(b.key()).second,
            "[combine] expected buffers that differ, got one of them twice ({})", b.name());
  }
}

}  // namespace

Tensor combine(Tape& tape, const std::vector<Tensor>& buffers, const Tensor& gates,
               const Tensor& slots) {
  check_slots("combine", slots, gates.dim(0), buffers.size());
  require(gates.dtype() == DType::kF32 && gates.shape() == slots.shape(),
          "[combine] expected gates {} f32, got {} {} ({})", slots.shape(), gates.shape(),
          name_of(gates.dtype()), gates.name());
  bool wants_dx = false;
  for (const Tensor& b : buffers) {
    require(
        b.shape().rank() == 2 && b.shape() == buffers[0].shape() && b.dtype() == buffers[0].dtype(),
        "[combine] expected buffers of one shape (rows, channels) and dtype, got {} and {} "
        "({})",
        buffers[0].shape(), b.shape(), b.name());
    wants_dx = tape.needs_grad(b) || wants_dx;
  }
  if (wants_dx) check_differ(buffers);
  const bool wants_dgates = tape.needs_grad(gates);
  const std::int64_t rows = buffers[0].dim(0);
  const Tensor y = tape.empty({slots.dim(0), buffers[0].dim(1)}, buffers[0].dtype(), "combine");
  launch_gather(tape.stream(), "combine.forward", {y}, buffers, rows, gates, slots);
  if (!wants_dx && !wants_dgates) return y;
  std::vector<Tensor> saved;
  for (const Tensor& b : buffers) saved.push_back(wants_dgates ? b : b.without_data());
  const Tensor saved_gates = wants_dx ? gates : gates.without_data();
  tape.record("combine", y, [&tape, saved, saved_gates, slots, rows](const Tensor& dy) {
    std::vector<GradTarget> targets;
    bool is_wanted = false;
    for (const Tensor& b : saved) {
      targets.push_back(tape.grad_target(b));
      is_wanted = is_wanted || targets.back();
    }
    if (is_wanted)
      launch_scatter(tape.stream(), "combine.backward_x", targets, rows, dy, saved_gates, slots);
    if (const GradTarget dgates = tape.grad_target(saved_gates))
      launch_dots(tape.stream(), dgates, saved, rows, dy, slots);
  });
  return y;
}

}  // namespace tessera::ops
