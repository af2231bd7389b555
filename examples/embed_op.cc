// An op of one's own on the tape: checks, forward, what is saved, backward; and its gradient check.
// (squared_relu.* is one that runs on GPUs as well.)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include "engine/gradcheck.h"
#include "engine/tape.h"

namespace engine = tessera::engine;
namespace gradcheck = tessera::engine::gradcheck;
using engine::Tape;
using engine::Tensor;

/// y = g x / |x|, row by row: x (.., C) f32, g (C) f32 -> y of the shape of x. Saves y / g, and a
/// norm for each row. Rows of zeros have no direction and give NaN. Throws InvalidArgument if
/// shapes or dtypes differ.
Tensor unit_rows(Tape& tape, const Tensor& x, engine::Parameter& g) {
  const Tensor gain = tape.use(g);  // counts the use; the value, which must be resident
  const std::int64_t width = gain.numel();
  engine::require(x.dtype() == engine::DType::kF32 && x.shape().rank() > 0 && x.dim(-1) == width,
                  "[unit_rows] expected x (.., {}) f32, got {} ({})", width, x.shape(), x.name());
  const Tensor y = tape.empty(x.shape(), x.dtype(), "unit_rows");
  const Tensor unit = tape.empty(x.shape(), x.dtype(), "unit_rows.unit");
  const Tensor norms = tape.empty({x.shape().rows()}, x.dtype(), "unit_rows.norms");
  tape.stream().launch(
      {.name = "unit_rows.forward", .flops = 4.0 * static_cast<double>(x.numel())}, [=] {
        for (std::int64_t r = 0; r < norms.numel(); ++r) {
          const float* row = x.data<float>() + r * width;
          double sum = 0;
          for (std::int64_t c = 0; c < width; ++c) sum += double{row[c]} * row[c];
          const float norm = norms.data<float>()[r] = static_cast<float>(std::sqrt(sum));
          for (std::int64_t c = 0; c < width; ++c) {
            unit.data<float>()[r * width + c] = row[c] / norm;
            y.data<float>()[r * width + c] = gain.data<float>()[c] * row[c] / norm;
          }
        }
      });
  const bool wants_dx = tape.needs_grad(x), wants_dg = tape.needs_grad(g);
  if (!wants_dx && !wants_dg) return y;
  // What the closure captures is what is saved: of x its identity alone.
  tape.record("unit_rows", y, [&tape, &g, x = x.without_data(), unit, norms](const Tensor& dy) {
    const engine::GradTarget dx = tape.grad_target(x), dg = tape.grad_target(g);
    const Tensor gain = g.value;
    tape.stream().launch({.name = "unit_rows.backward"}, [=] {
      const std::int64_t width = gain.numel();
      if (dg && !dg.accumulate) std::fill_n(dg.dst.data<float>(), width, 0.0f);
      for (std::int64_t r = 0; r < norms.numel(); ++r) {
        const float *d = dy.data<float>() + r * width, *u = unit.data<float>() + r * width;
        float dot = 0;
        for (std::int64_t c = 0; c < width; ++c) dot += d[c] * gain.data<float>()[c] * u[c];
        for (std::int64_t c = 0; c < width; ++c) {
          if (dg) dg.dst.data<float>()[c] += d[c] * u[c];
          if (!dx) continue;
          float& to = dx.dst.data<float>()[r * width + c];
          const float of_row = (d[c] * gain.data<float>()[c] - dot * u[c]) / norms.data<float>()[r];
          to = dx.accumulate ? to + of_row : of_row;
        }
      }
    });
  });
  return y;
}

// Gradients against differences, with data, frozen and shared leaves.
int main() {
  try {
    gradcheck::check_gradients(
        {.inputs = {{5, 7}}, .parameters = {{7}}, .build = [](Tape& tape, const auto& x, auto& p) {
           return unit_rows(tape, x[0], p[0]);
         }});
    std::puts("gradients are those of differences");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
