#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "engine/elementwise.h"
#include "ops/attention_cuda.h"
#include "ops/gemm.h"
#include "ops/softmax_rows.h"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Memory;
using engine::Tape;
using engine::Tensor;

namespace {

// [Note: attention tiles]
// A head's scores are computed kRows queries by kKeys keys at a time, tiles with no visible key are
// skipped, and within a tile a masked score is -inf, whose probability is exactly 0. Forward walks
// the key tiles of a row of queries with the online softmax: output and sum are relative to the
// largest score so far, and are scaled down when a larger one comes. Backward walks the same tiles,
// recomputes p = exp(score - lse) and adds
//   dv += p^T dy,  dk += ds^T q,  dq += ds k,  with  ds = p * (dy v^T - rowsum(dy * y)).
// Every loop has one order, so bits depend on values and shapes alone; the gradients of a shared kv
// head are summed in the order of its heads. q is scaled once when it is loaded, dq when stored.
// Few queries a tile waste little beyond the diagonal; many keys make the products large.
constexpr std::int64_t kRows = 32, kKeys = 256;

using Layout = AttentionLayout;

// One past the last key that queries [row, row + rows) see.
std::int64_t keys_end(const Layout& s, std::int64_t row, std::int64_t rows) {
  return s.causal ? row + rows : s.tokens;
}

// The work of `products` matrix products and one exponential, with three operations around it, for
// each visible pair.
double flops(const Layout& s, int products) {
  const auto t = static_cast<double>(s.tokens);
  const double pairs = s.causal ? t * (t + 1) / 2 : t * t;
  return pairs * static_cast<double>(s.batch * s.heads) *
         (2.0 * products * static_cast<double>(s.head_size) + kExpFlops + 3);
}

Layout check(const Tensor& qkv, const AttentionShape& shape, const engine::Device& device) {
  engine::require(qkv.dtype() == DType::kF32 || qkv.dtype() == DType::kBF16,
                  "[attention] expected f32 or bf16, got {} ({})", name_of(qkv.dtype()),
                  qkv.name());
  const std::int64_t heads = shape.num_heads;
  const std::int64_t kv_heads = shape.num_kv_heads == 0 ? heads : shape.num_kv_heads;
  engine::require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
                  "[attention] expected heads in equal groups, got {} heads and {} kv heads ({})",
                  heads, kv_heads, qkv.name());
  const std::int64_t parts = heads + 2 * kv_heads;
  engine::require(qkv.shape().rank() == 3 && qkv.dim(2) > 0 && qkv.dim(2) % parts == 0,
                  "[attention] expected (B, T, ({} + 2 * {}) * D), got {} ({})", heads, kv_heads,
                  qkv.shape(), qkv.name());
  const std::int64_t head_size = qkv.dim(2) / parts;
  engine::require(!device.is_cuda() || head_size <= kMaxCudaHeadSize,
                  "[attention] expected heads of at most {} on {}, got {} ({})", kMaxCudaHeadSize,
                  to_string(device), head_size, qkv.name());
  engine::require(!device.is_cuda() || std::max(heads, qkv.dim(0)) <= kMaxCudaGrid,
                  "[attention] expected a batch and heads of at most {} on {}, got {} and {} ({})",
                  kMaxCudaGrid, to_string(device), qkv.dim(0), heads, qkv.name());
  engine::require(shape.scale >= 0, "[attention] expected a scale of at least 0, got {} ({})",
                  shape.scale, qkv.name());
  const float scale = shape.scale == 0 ? 1 / std::sqrt(static_cast<float>(head_size)) : shape.scale;
  return {qkv.dim(0), qkv.dim(1), heads, kv_heads, head_size, scale, shape.causal};
}

Tensor scratch(const Memory& memory, std::int64_t rows, std::int64_t cols) {
  return Tensor::empty(memory, {rows, cols}, DType::kF32, "attention.scratch",
                       Category::kWorkspace);
}

// What the CPU kernels need beside the tensors; CUDA keeps it on the chip.
template <class Scratch>
std::optional<Scratch> host_scratch(const Tape& tape, const Layout& s) {
  if (tape.stream().device().is_cuda()) return {};
  return Scratch(tape.memory(), s);
}

void multiply(float* x, std::int64_t numel, float factor) {
  for (std::int64_t i = 0; i < numel; ++i) x[i] *= factor;
}

// Rows of one head, `ld` apart in the packed tensor, to rows of `width` in f32; and back.
template <class T>
void load(float* dst, const T* src, std::int64_t rows, std::int64_t width, std::int64_t ld) {
  for (std::int64_t r = 0; r < rows; ++r) engine::cast(dst + r * width, src + r * ld, width);
}

template <class T>
void store(T* dst, const float* src, std::int64_t rows, std::int64_t width, std::int64_t ld,
           bool accumulate) {
  for (std::int64_t r = 0; r < rows; ++r)
    engine::assign_or_add(dst + r * ld, src + r * width, width, accumulate);
}

// Queries [row, row + rows) against keys [key, key + keys).
struct Tile {
  std::int64_t row, rows, key, keys, head_size;

  // What there is for each query, for each key, and for each pair of them.
  template <class T>
  MatrixView<T> by_row(T* x) const {
    return {x, rows, head_size, head_size};
  }
  template <class T>
  MatrixView<T> by_key(T* x) const {
    return {x, keys, head_size, head_size};
  }
  MatrixView<float> square(float* x) const { return {x, rows, keys, kKeys}; }

  // scores = q k^T, with -inf where the key comes after the query.
  void scores(float* scores, const float* q, const float* k, bool causal) const {
    gemm(by_row(q), by_key(k).t(), square(scores), false);
    if (!causal || key + keys <= row + 1) return;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t visible = std::clamp<std::int64_t>(row + r + 1 - key, 0, keys);
      std::fill(scores + r * kKeys + visible, scores + r * kKeys + keys,
                -std::numeric_limits<float>::infinity());
    }
  }
};

struct ForwardScratch {
  ForwardScratch(const Memory& memory, const Layout& s)
      : k(scratch(memory, s.tokens, s.head_size)),
        v(scratch(memory, s.tokens, s.head_size)),
        q(scratch(memory, kRows, s.head_size)),
        out(scratch(memory, kRows, s.head_size)),
        scores(scratch(memory, kRows, kKeys)),
        max(scratch(memory, 1, kRows)),
        sum(scratch(memory, 1, kRows)) {}
  Tensor k, v;      // (T, D) of one kv head
  Tensor q, out;    // (kRows, D) of one head
  Tensor scores;    // (kRows, kKeys)
  Tensor max, sum;  // (kRows) of the keys so far
};

// The online softmax: takes a tile of scores to probabilities relative to the new maximum, and
// scales what was summed so far to match.
void update_softmax(const Tile& tile, float* scores, float* max, float* sum, float* out) {
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    float* row = scores + r * kKeys;
    const float largest = row_max(row, tile.keys);
    if (tile.key == 0) {
      max[r] = largest;
      sum[r] = exp_row(row, tile.keys, largest);
      continue;
    }
    if (largest > max[r]) {
      const float factor = exp(max[r] - largest);
      max[r] = largest;
      sum[r] *= factor;
      multiply(out + r * tile.head_size, tile.head_size, factor);
    }
    sum[r] += exp_row(row, tile.keys, max[r]);
  }
}

// Queries [row, row + rows) of one head, loaded in w.q: leaves the result in w.out, and in w.max
// the log-sum-exp.
void attend(const Layout& s, std::int64_t row, std::int64_t rows, const ForwardScratch& w) {
  float* q = w.q.data<float>();
  float* scores = w.scores.data<float>();
  float* out = w.out.data<float>();
  float* max = w.max.data<float>();
  float* sum = w.sum.data<float>();
  const std::int64_t end = keys_end(s, row, rows);
  for (std::int64_t key = 0; key < end; key += kKeys) {
    const Tile tile{row, rows, key, std::min(kKeys, end - key), s.head_size};
    tile.scores(scores, q, w.k.data<float>() + key * s.head_size, s.causal);
    update_softmax(tile, scores, max, sum, out);
    const float* v = w.v.data<float>() + key * s.head_size;
    gemm(tile.square(scores), tile.by_key(v), tile.by_row(out), key > 0);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    multiply(out + r * s.head_size, s.head_size, 1 / sum[r]);
    max[r] += std::log(sum[r]);
  }
}

// `lse` may be null.
template <class T>
void forward(const Layout& s, const T* qkv, T* y, float* lse, const ForwardScratch& w) {
  const std::int64_t d = s.head_size, ld = s.qkv_width();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      if (h % s.group() == 0) {
        load(w.k.data<float>(), qkv + s.k_at(b, h / s.group()), s.tokens, d, ld);
        load(w.v.data<float>(), qkv + s.v_at(b, h / s.group()), s.tokens, d, ld);
      }
      for (std::int64_t row = 0; row < s.tokens; row += kRows) {
        const std::int64_t rows = std::min(kRows, s.tokens - row);
        load(w.q.data<float>(), qkv + s.q_at(b, h) + row * ld, rows, d, ld);
        multiply(w.q.data<float>(), rows * d, s.scale);
        attend(s, row, rows, w);
        store(y + s.y_at(b, h) + row * s.y_width(), w.out.data<float>(), rows, d, s.y_width(),
              false);
        if (lse != nullptr) engine::cast(lse + s.lse_at(b, h) + row, w.max.data<float>(), rows);
      }
    }
  }
}

struct BackwardScratch {
  BackwardScratch(const Memory& memory, const Layout& s)
      : k(scratch(memory, s.tokens, s.head_size)),
        v(scratch(memory, s.tokens, s.head_size)),
        dk(scratch(memory, s.tokens, s.head_size)),
        dv(scratch(memory, s.tokens, s.head_size)),
        q(scratch(memory, kRows, s.head_size)),
        y(scratch(memory, kRows, s.head_size)),
        dy(scratch(memory, kRows, s.head_size)),
        dq(scratch(memory, kRows, s.head_size)),
        p(scratch(memory, kRows, kKeys)),
        ds(scratch(memory, kRows, kKeys)) {}
  Tensor k, v, dk, dv;  // (T, D) of one kv head
  Tensor q, y, dy, dq;  // (kRows, D) of one head
  Tensor p, ds;         // (kRows, kKeys)
};

// Takes scores to probabilities in `p`, and dy v^T to the gradient of the scores in `ds`.
void scores_backward(const Tile& tile, float* p, float* ds, const float* lse, const float* dy,
                     const float* y) {
  const std::int64_t d = tile.head_size;
  for (std::int64_t r = 0; r < tile.rows; ++r, dy += d, y += d) {
    const float delta = lane_sum(d, [=](std::int64_t i) { return dy[i] * y[i]; });
    float* __restrict p_row = p + r * kKeys;
    float* __restrict ds_row = ds + r * kKeys;
    for (std::int64_t c = 0; c < tile.keys; ++c) {
      p_row[c] = exp(p_row[c] - lse[r]);
      ds_row[c] = p_row[c] * (ds_row[c] - delta);
    }
  }
}

// Queries [row, row + rows) of one head, loaded in w.q, w.y, w.dy: assigns w.dq, adds to w.dk and
// w.dv.
void attend_backward(const Layout& s, std::int64_t row, std::int64_t rows, const float* lse,
                     const BackwardScratch& w) {
  const float* q = w.q.data<float>();
  const float* dy = w.dy.data<float>();
  float* p = w.p.data<float>();
  float* ds = w.ds.data<float>();
  const std::int64_t end = keys_end(s, row, rows);
  for (std::int64_t key = 0; key < end; key += kKeys) {
    const Tile tile{row, rows, key, std::min(kKeys, end - key), s.head_size};
    const std::int64_t at = key * s.head_size;
    const float* k = w.k.data<float>() + at;
    tile.scores(p, q, k, s.causal);
    gemm(tile.by_row(dy), tile.by_key(w.v.data<float>() + at).t(), tile.square(ds), false);
    scores_backward(tile, p, ds, lse, dy, w.y.data<float>());
    gemm(tile.square(p).t(), tile.by_row(dy), tile.by_key(w.dv.data<float>() + at), true);
    gemm(tile.square(ds).t(), tile.by_row(q), tile.by_key(w.dk.data<float>() + at), true);
    gemm(tile.square(ds), tile.by_key(k), tile.by_row(w.dq.data<float>()), key > 0);
  }
}

template <class T>
void backward(const Layout& s, const T* qkv, const T* y, const float* lse, const T* dy, T* dqkv,
              bool accumulate, const BackwardScratch& w) {
  const std::int64_t d = s.head_size, ld = s.qkv_width();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t g = h / s.group();
      if (h % s.group() == 0) {
        load(w.k.data<float>(), qkv + s.k_at(b, g), s.tokens, d, ld);
        load(w.v.data<float>(), qkv + s.v_at(b, g), s.tokens, d, ld);
        engine::fill_zero(w.dk);
        engine::fill_zero(w.dv);
      }
      for (std::int64_t row = 0; row < s.tokens; row += kRows) {
        const std::int64_t rows = std::min(kRows, s.tokens - row);
        const std::int64_t q_at = s.q_at(b, h) + row * ld, y_at = s.y_at(b, h) + row * s.y_width();
        load(w.q.data<float>(), qkv + q_at, rows, d, ld);
        multiply(w.q.data<float>(), rows * d, s.scale);
        load(w.y.data<float>(), y + y_at, rows, d, s.y_width());
        load(w.dy.data<float>(), dy + y_at, rows, d, s.y_width());
        attend_backward(s, row, rows, lse + s.lse_at(b, h) + row, w);
        multiply(w.dq.data<float>(), rows * d, s.scale);
        store(dqkv + q_at, w.dq.data<float>(), rows, d, ld, accumulate);
      }
      if ((h + 1) % s.group() == 0) {
        store(dqkv + s.k_at(b, g), w.dk.data<float>(), s.tokens, d, ld, accumulate);
        store(dqkv + s.v_at(b, g), w.dv.data<float>(), s.tokens, d, ld, accumulate);
      }
    }
  }
}

void launch_backward(const Tape& tape, const Layout& s, const Tensor& qkv, const Tensor& y,
                     const Tensor& lse, const Tensor& dy, const GradTarget& dqkv) {
  const std::int64_t nbytes = qkv.nbytes();
  const auto w = host_scratch<BackwardScratch>(tape, s);
  tape.stream().launch(
      {.name = "attention.backward",
       .flops = flops(s, 5),
       .bytes_read =
           nbytes + y.nbytes() + dy.nbytes() + lse.nbytes() + (dqkv.accumulate ? nbytes : 0),
       .bytes_written = nbytes},
      [=] {
        engine::dispatch_float(qkv.dtype(), "attention", [&](auto t) {
          using T = decltype(t);
          backward(s, qkv.data<T>(), y.data<T>(), lse.data<float>(), dy.data<T>(),
                   dqkv.dst.data<T>(), dqkv.accumulate, *w);
        });
      },
      [&](const auto& stream) {
        const Tensor delta = scratch(tape.memory(), s.batch * s.heads, s.tokens);
        attention_backward_cuda(stream, s, qkv, y, lse, dy, delta, dqkv.dst, dqkv.accumulate);
      });
}

}  // namespace

Tensor attention(Tape& tape, const Tensor& qkv, const AttentionShape& shape) {
  const Layout s = check(qkv, shape, tape.stream().device());
  const bool saves = tape.needs_grad(qkv);
  const Tensor y = tape.empty({s.batch, s.tokens, s.y_width()}, qkv.dtype(), "attention");
  const Tensor lse =
      saves ? tape.empty({s.batch, s.heads, s.tokens}, DType::kF32, "attention.lse") : Tensor();
  const auto w = host_scratch<ForwardScratch>(tape, s);
  tape.stream().launch(
      {.name = "attention.forward",
       .flops = flops(s, 2),
       .bytes_read = qkv.nbytes(),
       .bytes_written = y.nbytes() + (saves ? lse.nbytes() : 0)},
      [=] {
        engine::dispatch_float(qkv.dtype(), "attention", [&](auto t) {
          using T = decltype(t);
          forward(s, qkv.data<T>(), y.data<T>(), saves ? lse.data<float>() : nullptr, *w);
        });
      },
      [&](const auto& stream) { attention_forward_cuda(stream, s, qkv, y, lse); });
  if (!saves) return y;
  tape.record("attention", y, [&tape, s, qkv, y, lse](const Tensor& dy) {
    if (const GradTarget dqkv = tape.grad_target(qkv))
      launch_backward(tape, s, qkv, y, lse, dy, dqkv);
  });
  return y;
}

}  // namespace tessera::ops
