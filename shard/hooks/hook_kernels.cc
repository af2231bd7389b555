#include "shard/hooks/hook_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/hooks/half.h"
#include "shard/hooks/hook_kernels_cuda.h"

namespace tessera::shard {

using engine::DType;
using engine::store_f32;
using engine::Stream;
using engine::Tensor;
using engine::to_f32;

namespace {

// The address of an optional tensor; views may be released before the stream comes to them.
std::byte* address(const Tensor& t) { return t.defined() ? t.raw() : nullptr; }

bool is_bad(const std::byte* bad) {
  return bad != nullptr && *reinterpret_cast<const std::int64_t*>(bad) != 0;
}

float* floats(const Tensor& t) { return t.data<float>(); }

constexpr double kLostBelow = 1e-6;  // of the norm that a column had

// Twice is enough (Giraud et al. 2005). Columns that `eps` has made shorter than 1 are no
// directions to project on more than once.
int num_passes(double eps) { return eps > 0 ? 1 : 2; }

// A matrix (n, r) whose columns are made orthonormal.
struct Columns {
  float* data;
  std::int64_t rows, rank;

  double dot(std::int64_t a, std::int64_t b) const {
    double sum = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      sum += static_cast<double>(data[i * rank + a]) * static_cast<double>(data[i * rank + b]);
    }
    return sum;
  }
  // What is left of column c without those before it: its norm, and what that was.
  std::pair<double, double> project(std::int64_t c, int passes) const {
    const double before = std::sqrt(dot(c, c));
    for (int pass = 0; pass < passes; ++pass) {
      for (std::int64_t k = 0; k < c; ++k) {
        const double along = dot(k, c);
        for (std::int64_t i = 0; i < rows; ++i) {
          float& x = data[i * rank + c];
          x = static_cast<float>(x - along * static_cast<double>(data[i * rank + k]));
        }
      }
    }
    return {std::sqrt(dot(c, c)), before};
  }
  void scale(std::int64_t c, double factor) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      float& x = data[i * rank + c];
      x = static_cast<float>(x * factor);
    }
  }
  void replace(std::int64_t c, const engine::RandomStream& random) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      data[i * rank + c] = random.normal(static_cast<std::uint64_t>(rows * rank + i * rank + c));
    }
  }
};

void orthonormalize(const Columns& m, double eps, const LostColumns& lost) {
  for (std::int64_t c = 0; c < m.rank; ++c) {
    auto [norm, before] = m.project(c, num_passes(eps));
    if (norm <= kLostBelow * before && lost.replaced) {
      m.replace(c, lost.random);
      std::tie(norm, before) = m.project(c, num_passes(eps));
    }
    m.scale(c, norm <= kLostBelow * before ? 0.0 : 1.0 / (norm + eps));
  }
}

}  // namespace

void launch_add_error(const Stream& stream, const Tensor& input, const Tensor& gradient,
                      const Tensor& error, const std::string& detail) {
  stream.launch(
      {.name = "hook.add_error",
       .flops = error.defined() ? static_cast<double>(input.numel()) : 0,
       .bytes_read = gradient.nbytes() + (error.defined() ? error.nbytes() : 0),
       .bytes_written = input.nbytes(),
       .detail = detail},
      [input, gradient, error, out = floats(input), from = gradient.raw(), more = address(error)] {
        engine::dispatch_float(gradient.dtype(), "add_error", [&](auto g) {
          const auto* const src = reinterpret_cast<const decltype(g)*>(from);
          if (more == nullptr) return engine::cast(out, src, input.numel());
          engine::dispatch_float(error.dtype(), "add_error", [&](auto e) {
            const auto* const old = reinterpret_cast<const decltype(e)*>(more);
            for (std::int64_t i = 0; i < input.numel(); ++i)
              out[i] = to_f32(src[i]) + to_f32(old[i]);
          });
        });
      },
      [&](const auto& on) { add_error_cuda(on, input, gradient, error); });
}

void launch_draw(const Stream& stream, const Tensor& out, const engine::RandomStream& random,
                 const std::string& detail) {
  stream.launch(
      {.name = "hook.draw", .bytes_written = out.nbytes(), .detail = detail},
      [out, to = floats(out), random] {
        for (std::int64_t i = 0; i < out.numel(); ++i) {
          to[i] = random.normal(static_cast<std::uint64_t>(i));
        }
      },
      [&](const auto& on) { draw_cuda(on, out, random); });
}

void launch_orthonormalize(const Stream& stream, const Tensor& matrix, double eps,
                           const LostColumns& lost, const Tensor& bad, const std::string& detail) {
  const std::int64_t rank = matrix.dim(1);
  stream.launch(
      {.name = "hook.orthonormalize",
       .flops =
           4.0 * num_passes(eps) * static_cast<double>(matrix.numel()) * static_cast<double>(rank),
       .bytes_read = matrix.nbytes(),
       .bytes_written = matrix.nbytes(),
       .detail = detail},
      [matrix, bad, m = Columns{floats(matrix), matrix.dim(0), rank}, eps, lost,
       flag = address(bad)] {
        if (!is_bad(flag)) orthonormalize(m, eps, lost);
      },
      [&](const auto& on) { orthonormalize_cuda(on, matrix, eps, lost, bad); });
}

void launch_look(const Stream& stream, const Tensor& bad, const Tensor& values,
                 const std::string& detail) {
  stream.launch(
      {.name = "hook.look", .bytes_read = values.nbytes(), .detail = detail},
      [bad, values, flag = bad.data<std::int64_t>(), x = floats(values)] {
        const auto finite = [](float v) { return std::isfinite(v); };
        if (!std::all_of(x, x + values.numel(), finite)) *flag = 1;
      },
      [&](const auto& on) { look_cuda(on, bad, values); });
}

void launch_mean(const Stream& stream, const Tensor& sums, std::int64_t count, const Tensor& kept,
                 const Tensor& bad, const std::string& detail) {
  stream.launch(
      {.name = "hook.mean",
       .flops = static_cast<double>(sums.numel()),
       .bytes_read = sums.nbytes(),
       .bytes_written = sums.nbytes() * (kept.defined() ? 2 : 1),
       .detail = detail},
      [sums, count, kept, bad, x = floats(sums), to = address(kept), flag = address(bad)] {
        for (std::int64_t i = 0; i < sums.numel(); ++i) x[i] /= static_cast<float>(count);
        if (to == nullptr || is_bad(flag)) return;
        engine::cast(reinterpret_cast<float*>(to), x, sums.numel());
      },
      [&](const auto& on) { mean_cuda(on, sums, count, kept, bad); });
}

void launch_add_decompressed(const Stream& stream, const Tensor& sum, const Tensor& mean,
                             std::int64_t count, bool accumulate, const Tensor& bad,
                             const std::string& detail) {
  stream.launch(
      {.name = "hook.add_decompressed",
       .flops = (accumulate ? 2.0 : 1.0) * static_cast<double>(sum.numel()),
       .bytes_read = mean.nbytes() + (accumulate ? sum.nbytes() : 0),
       .bytes_written = sum.nbytes(),
       .detail = detail},
      [sum, mean, bad, to = floats(sum), from = floats(mean), factor = static_cast<float>(count),
       accumulate, flag = address(bad)] {
        if (is_bad(flag)) {
          std::fill_n(to, sum.numel(), std::numeric_limits<float>::quiet_NaN());
          return;
        }
        for (std::int64_t i = 0; i < sum.numel(); ++i) {
          to[i] = (accumulate ? to[i] : 0.0f) + factor * from[i];
        }
      },
      [&](const auto& on) { add_decompressed_cuda(on, sum, mean, count, accumulate, bad); });
}

void launch_keep_error(const Stream& stream, const Tensor& error, const Tensor& before,
                       const Tensor& input, const Tensor& decompressed, const Tensor& bad,
                       const std::string& detail) {
  stream.launch(
      {.name = "hook.keep_error",
       .flops = static_cast<double>(error.numel()),
       .bytes_read = input.nbytes() + decompressed.nbytes(),
       .bytes_written = error.nbytes(),
       .detail = detail},
      [error, before, input, decompressed, bad, to = error.raw(), was = before.raw(),
       in = floats(input), out = floats(decompressed), flag = address(bad)] {
        engine::dispatch_float(error.dtype(), "keep_error", [&](auto e) {
          using E = decltype(e);
          auto* const kept = reinterpret_cast<E*>(to);
          const auto* const old = reinterpret_cast<const E*>(was);
          const bool keeps_old = is_bad(flag);
          for (std::int64_t i = 0; i < error.numel(); ++i) {
            E rounded;
            store_f32(rounded, in[i] - out[i]);
            kept[i] = keeps_old || !std::isfinite(to_f32(rounded)) ? old[i] : rounded;
          }
        });
      },
      [&](const auto& on) { keep_error_cuda(on, error, before, input, decompressed, bad); });
}

void launch_pack_half(const Stream& stream, const Tensor& words, const Tensor& in,
                      const HalfBlocks& blocks, const std::string& detail) {
  stream.launch(
      {.name = "hook.pack_half",
       .bytes_read = in.nbytes(),
       .bytes_written = words.nbytes(),
       .detail = detail},
      [words, in, blocks, to = reinterpret_cast<Float16*>(words.raw()), from = in.raw()] {
        engine::dispatch_float(in.dtype(), "pack_half", [&](auto t) {
          const auto* const x = reinterpret_cast<const decltype(t)*>(from);
          for (std::int64_t r = 0; r < blocks.num_ranks; ++r) {
            const Range block = blocks.of(r, in.numel());
            Float16* const out = to + r * blocks.block_numel;
            for (std::int64_t i = 0; i < block.numel; ++i) {
              out[i] = Float16::from_float(to_f32(x[block.begin + i]));
            }
            std::fill(out + block.numel, out + blocks.block_numel, Float16{});
          }
        });
      },
      [&](const auto& on) { pack_half_cuda(on, words, in, blocks); });
}

void launch_add_halves(const Stream& stream, const Tensor& out, const Tensor& words,
                       std::int64_t num_ranks, std::int64_t block_numel, bool accumulate,
                       const std::string& detail) {
  stream.launch(
      {.name = "hook.add_halves",
       .flops = static_cast<double>(out.numel() * num_ranks),
       .bytes_read = words.nbytes() + (accumulate ? out.nbytes() : 0),
       .bytes_written = out.nbytes(),
       .detail = detail},
      [out, words, num_ranks, block_numel, accumulate, to = floats(out),
       from = reinterpret_cast<const Float16*>(words.raw())] {
        for (std::int64_t r = 0; r < num_ranks; ++r) {
          const Float16* const block = from + r * block_numel;
          const bool adds = accumulate || r > 0;
          for (std::int64_t i = 0; i < out.numel(); ++i) {
            to[i] = adds ? to[i] + block[i].to_float() : block[i].to_float();
          }
        }
      },
      [&](const auto& on) { add_halves_cuda(on, out, words, num_ranks, block_numel, accumulate); });
}

}  // namespace tessera::shard
