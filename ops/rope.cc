#include "ops/rope.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/elementwise.h"
#include "ops/rope_cuda.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::store_f32;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

RopeShape check(const Tensor& x, const RopeOptions& options) {
  const int rank = x.shape().rank();
  engine::require(rank == 3 || rank == 4,
                  "[rope] expected (B, T, N*D) or (B, T, N, D), got {} ({})", x.shape(), x.name());
  engine::require(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16,
                  "[rope] expected f32 or bf16, got {} ({})", name_of(x.dtype()), x.name());
  const std::int64_t width = rank == 3 ? x.dim(2) : x.dim(2) * x.dim(3);
  const std::int64_t head_size = options.head_size == 0 ? x.dim(-1) : options.head_size;
  engine::require(head_size > 0 && head_size % 2 == 0,
                  "[rope] expected an even head size, got {} ({})", head_size, x.name());
  engine::require(width % head_size == 0 && (rank == 3 || x.dim(-1) == head_size),
                  "[rope] expected heads of {}, got {} ({})", head_size, x.shape(), x.name());
  const std::int64_t heads = width / head_size;
  engine::require(options.num_heads >= 0 && options.num_heads <= heads,
                  "[rope] expected at most {} heads to rotate, got {} ({})", heads,
                  options.num_heads, x.name());
  engine::require(options.base > 0, "[rope] expected a positive base, got {}", options.base);
  const RopeScaling& scaling = options.scaling;
  engine::require(scaling.factor >= 1 && scaling.original_positions >= 0,
                  "[rope] expected scaling by at least 1, of 0 or more positions, got {} and {}",
                  scaling.factor, scaling.original_positions);
  engine::require(scaling.low > 0 && scaling.low < scaling.high,
                  "[rope] expected 0 < low < high of a scaling, got {} and {}", scaling.low,
                  scaling.high);
  const Tensor& at = options.positions;
  const engine::Shape of_all{x.dim(1)}, of_each{x.dim(0), x.dim(1)};
  engine::require(!at.defined() || (at.dtype() == DType::kI32 &&
                                    (at.shape() == of_all || at.shape() == of_each)),
                  "[rope] expected positions i32 {} or {}, got {} {} ({})", of_all, of_each,
                  name_of(at.dtype()), at.shape(), at.name());
  return {x.dim(0), x.dim(1), heads, options.num_heads == 0 ? heads : options.num_heads, head_size};
}

// The angles of all pairs from one position to the next.
std::vector<double> steps_of(std::int64_t head_size, double base, const RopeScaling& scaling) {
  std::vector<double> steps;
  for (std::int64_t i = 0; i < head_size / 2; ++i) {
    const double step =
        std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(head_size));
    steps.push_back(scaling.scaled(step));
  }
  return steps;
}

// Row t of the table: D/2 cosines, D/2 sines of a position, positions[t] or t, times the steps. A
// row turns the one before in double precision, so the error grows as T * 2^-53 and stays far below
// that of an f32; where positions do not follow each other, it begins with angles of its own.
void fill_table(float* table, std::int64_t tokens, const std::int32_t* positions,
                const std::vector<double>& steps) {
  const std::size_t half = steps.size();
  std::vector<double> cosines(half), sines(half), cos_step(half), sin_step(half);
  for (std::size_t i = 0; tokens > 1 && i < half; ++i) {
    cos_step[i] = std::cos(steps[i]);
    sin_step[i] = std::sin(steps[i]);
  }
  std::int64_t before = std::numeric_limits<std::int64_t>::min();
  for (std::int64_t t = 0; t < tokens; ++t, table += 2 * half) {
    const std::int64_t position = positions != nullptr ? positions[t] : t;
    for (std::size_t i = 0; i < half; ++i) {
      if (position == 0 || position != before + 1) {
        const double angle = static_cast<double>(position) * steps[i];
        cosines[i] = std::cos(angle);
        sines[i] = std::sin(angle);
      }
      table[i] = static_cast<float>(cosines[i]);
      table[half + i] = static_cast<float>(sines[i]);
      const double next = cosines[i] * cos_step[i] - sines[i] * sin_step[i];
      sines[i] = sines[i] * cos_step[i] + cosines[i] * sin_step[i];
      cosines[i] = next;
    }
    before = position;
  }
}

// y = or += the rotation of x by +angle, or by -angle for `direction` = -1.
template <bool kAccumulate, class T>
void rotate(T* y, const T* x, const float* table, const RopeShape& s, float direction) {
  const std::int64_t half = s.head_size / 2;
  for (std::int64_t row = 0; row < s.batch * s.tokens; ++row) {
    const float* cosines = table + row % s.tokens * s.head_size;
    const float* sines = cosines + half;
    for (std::int64_t head = 0; head < s.rotated; ++head) {
      T* __restrict y1 = y + row * s.width() + head * s.head_size;
      T* __restrict y2 = y1 + half;
      const T* x1 = x + row * s.width() + head * s.head_size;
      const T* x2 = x1 + half;
      for (std::int64_t i = 0; i < half; ++i) {
        const float a = to_f32(x1[i]), b = to_f32(x2[i]), sine = direction * sines[i];
        const float p = a * cosines[i] - b * sine, q = b * cosines[i] + a * sine;
        store_f32(y1[i], kAccumulate ? to_f32(y1[i]) + p : p);
        store_f32(y2[i], kAccumulate ? to_f32(y2[i]) + q : q);
      }
    }
    const std::int64_t begin = row * s.width() + s.rotated * s.head_size;
    engine::assign_or_add(y + begin, x + begin, (s.heads - s.rotated) * s.head_size, kAccumulate);
  }
}

void launch_rotation(const Tape& tape, std::string_view name, const Tensor& y, const Tensor& x,
                     const Tensor& table, const RopeShape& s, float direction, bool accumulate) {
  tape.stream().launch(
      {.name = name,
       .flops = s.flops(),
       .bytes_read = x.nbytes() + table.nbytes() + (accumulate ? y.nbytes() : 0),
       .bytes_written = y.nbytes()},
      [=] {
        engine::dispatch_float(x.dtype(), "rope", [&](auto t) {
          using T = decltype(t);
          const auto run = accumulate ? rotate<true, T> : rotate<false, T>;
          run(y.data<T>(), x.data<T>(), table.data<float>(), s, direction);
        });
      },
      [=](const auto& stream) {
        rope_rotate_cuda(stream, {y, accumulate}, x, table, s, direction);
      });
}

}  // namespace

Tensor rope(Tape& tape, const Tensor& x, const RopeOptions& options) {
  RopeShape s = check(x, options);
  const Tensor& positions = options.positions;
  if (positions.defined() && positions.shape().rank() == 2) {  // all samples are as one
    s.tokens *= s.batch;
    s.batch = 1;
  }
  const Tensor table = tape.empty({s.tokens, s.head_size}, DType::kF32, "rope.table");
  const double base = options.base;
  const RopeScaling scaling = options.scaling;
  // Two products and a sum for each of the two, in double.
  tape.stream().launch(
      {.name = "rope.table",
       .flops = 3.0 * static_cast<double>(table.numel()),
       .bytes_read = positions.defined() ? positions.nbytes() : 0,
       .bytes_written = table.nbytes()},
      [=] {
        const std::vector<double> steps = steps_of(s.head_size, base, scaling);
        fill_table(table.data<float>(), s.tokens,
                   positions.defined() ? positions.data<std::int32_t>() : nullptr, steps);
      },
      [=](const auto& stream) { rope_table_cuda(stream, table, positions, base, scaling); });
  const Tensor y = tape.empty(x.shape(), x.dtype(), "rope");
  launch_rotation(tape, "rope.forward", y, x, table, s, 1, false);
  if (!tape.needs_grad(x)) return y;
  tape.record("rope", y, [&tape, x = x.without_data(), table, s](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x))
      launch_rotation(tape, "rope.backward", dx.dst, dy, table, s, -1, dx.accumulate);
  });
  return y;
}

}  // namespace tessera::ops
