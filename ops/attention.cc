#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "engine/elementwise.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/pairs.h"
#include "engine/gemm/transpose.h"
#include "ops/attention_cuda.h"
#include "ops/attention_pairs.h"
#include "ops/attention_scores.h"

namespace tessera::ops {

using engine::BFloat16;
using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::MatrixView;
using engine::Memory;
using engine::multiplies_bf16;
using engine::Product;
using engine::Products;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

// [Note: attention tiles]
// A head's scores are computed some queries by some keys at a time, tiles with no visible key are
// skipped, and within a tile a masked score's probability is exactly 0. Forward walks the key tiles
// of a row of queries with the online softmax: output and sum are relative to the largest score so
// far, and are scaled down when a larger one comes. Backward walks the same tiles, recomputes p =
// exp(scale q k^T - lse) and adds
//   dv += p^T dy,  dk += ds^T q,  dq += ds k,  with  ds = p * (dy v^T - rowsum(dy * y)),
// where scale is left to the end of dk and dq. Every loop has one order, so bits depend on values
// and shapes alone; the gradients of a shared kv head are summed in the order of its heads.
// Few queries a tile waste little beyond the diagonal; many keys make the products large.
//
// Operands of products (P) are f32 rows where they lie, but for the second of q k^T and of dy v^T,
// which is transposed once for all tiles; of bf16 rows copies, dense as kernels for bf16 want them,
// or widened where the CPU does not multiply bf16. Where it does, probabilities and
// the gradients of scores are rounded to bf16, in small products as well.
struct TileShape {
  std::int64_t rows;  // queries: a divisor of keys, so that each sees its tile's first key
  std::int64_t keys;
};

// Of tiles whose products read P. Kernels of f32 take 6 rows and 16 or 48 columns at a time; those
// without AVX-512 copy the keys for each product, so they get more rows. On matrices of bf16 a
// product of fewer than 128 rows takes as long to start as to run.
// There is room for as many rows in f32 on every CPU, so that plans are the same.
constexpr std::int64_t kMostRows = 48;

template <class P>
TileShape tile_shape() {
  if constexpr (std::is_same_v<P, float>) {
    return {engine::isa() >= engine::Isa::kV4 ? 24 : kMostRows, 288};
  } else {
    return {engine::isa() >= engine::Isa::kV4Amx ? 128 : 64, 256};
  }
}

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
  const Tensor& at = shape.positions;
  engine::require(!at.defined() || (at.dtype() == DType::kI32 &&
                                    at.shape() == engine::Shape{qkv.dim(0), qkv.dim(1)}),
                  "[attention] expected positions i32 ({}, {}), got {} {} ({})", qkv.dim(0),
                  qkv.dim(1), name_of(at.dtype()), at.shape(), at.name());
  engine::require(!at.defined() || shape.causal, "[attention] expected causal with positions ({})",
                  qkv.name());
  return {qkv.dim(0), qkv.dim(1), heads, kv_heads, head_size, scale, shape.causal};
}

Tensor scratch(const Memory& memory, std::int64_t rows, std::int64_t cols,
               DType dtype = DType::kF32) {
  return Tensor::empty(memory, {rows, cols}, dtype, "attention.scratch", Category::kWorkspace);
}

// What products read. Documents have many lengths, and a library compiles its products of bf16 for
// each shape of a tile.
DType operand_dtype(DType dtype, bool has_documents) {
  return multiplies_bf16() && !has_documents ? dtype : DType::kF32;
}

// Calls `fn(T{}, P{})` with what is stored and what products read.
template <class F>
void dispatch(DType dtype, bool has_documents, F fn) {
  if (dtype == DType::kF32) return fn(float{}, float{});
  if (operand_dtype(dtype, has_documents) == DType::kBF16) return fn(BFloat16{}, BFloat16{});
  fn(BFloat16{}, float{});
}

// Calls `run(layout, row, lse)` for each sequence whose tokens see no others: for all of `s`, or
// for each document, as if it were alone. `row`: of (B * T), its first; `lse`: where its
// log-sum-exps begin.
template <class Run>
void for_each_document(const Layout& s, const Tensor& positions, Run run) {
  if (!positions.defined()) return run(PartLayout{s, s.tokens}, 0, 0);
  const std::int32_t* const at = positions.data<std::int32_t>();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t begin = 0, end = 0; begin < s.tokens; begin = end) {
      end = begin + 1;
      while (end < s.tokens && at[b * s.tokens + end] != 0) ++end;
      PartLayout one{s, s.tokens};
      one.batch = 1;
      one.tokens = end - begin;
      run(one, b * s.tokens + begin, s.lse_at(b, 0) + begin);
    }
  }
}

// Whether the CPU's kernels are those of attention_pairs.h.
bool in_pairs(const Tape& tape, DType dtype) {
  return !tape.stream().device().is_cuda() && dtype == DType::kBF16 && engine::multiplies_pairs();
}
std::optional<PairAttention> pair_kernels(const Tape& tape, const Layout& s, DType dtype,
                                          bool is_backward) {
  if (!in_pairs(tape, dtype)) return {};
  return PairAttention(tape.memory(), s, is_backward);
}

// What the CPU's other kernels need besides the tensors; CUDA keeps it on the chip.
template <class Scratch>
std::optional<Scratch> host_scratch(const Tape& tape, const Layout& s, DType dtype,
                                    bool has_documents) {
  if (tape.stream().device().is_cuda() || in_pairs(tape, dtype)) return {};
  return Scratch(tape, s, dtype, operand_dtype(dtype, has_documents));
}

// Rows of one head, `ld` apart in a packed tensor, as an operand: where they lie, or a copy.
template <class P, class T>
MatrixView<const P> operand(const T* src, std::int64_t rows, std::int64_t width, std::int64_t ld,
                            const Tensor& space) {
  if constexpr (std::is_same_v<T, float>) {
    return {src, rows, width, ld};
  } else {
    P* const dst = space.data<P>();
    for (std::int64_t r = 0; r < rows; ++r) engine::cast(dst + r * width, src + r * ld, width);
    return {dst, rows, width, width};
  }
}

// The transpose of the same, (width, rows), as the second operand of a product: f32 is copied.
template <class P, class T>
MatrixView<const P> transposed_operand(const T* src, std::int64_t rows, std::int64_t width,
                                       std::int64_t ld, const Tensor& space) {
  if constexpr (std::is_same_v<P, float>) {
    float* const dst = space.data<float>();
    if constexpr (std::is_same_v<T, float>) {
      engine::transpose(dst, rows, src, rows, width, ld);
    } else {
      constexpr std::int64_t kStrip = 16;  // rows that are read side by side
      for (std::int64_t begin = 0; begin < rows; begin += kStrip) {
        const std::int64_t end = std::min(begin + kStrip, rows);
        for (std::int64_t i = 0; i < width; ++i)
          for (std::int64_t r = begin; r < end; ++r) dst[i * rows + r] = to_f32(src[r * ld + i]);
      }
    }
    return {dst, width, rows, rows};
  } else {
    return operand<P>(src, rows, width, ld, space).t();
  }
}

template <class P>
MatrixView<const P> cols_of(const MatrixView<const P>& m, std::int64_t begin, std::int64_t count) {
  return {m.data + begin * (m.transposed ? m.ld : 1), m.rows, count, m.ld, m.transposed};
}

template <class P>
MatrixView<const P> rows_of(const MatrixView<const P>& m, std::int64_t begin, std::int64_t count) {
  return {m.data + begin * m.ld, count, m.cols, m.ld};
}

// Columns of a tile's scores that are computed: whole lanes make whole vectors, and what lies
// after the tile's keys is masked.
std::int64_t num_cols(const ScoreTile& tile, const Layout& s) {
  return std::min(tile.ld(), s.tokens - tile.key);
}

// A tile, and what multiplies it.
struct Tile : ScoreTile {
  Products& products;
  const Tensor& scratch;

  template <class A, class B>
  void product(const MatrixView<const A>& a, const MatrixView<const B>& b,
               const MatrixView<float>& c, bool accumulate) const {
    Product<A, B, float>{a, b, c, accumulate}.run(products, scratch);
  }
  // dst = q k^T; k_t is of all keys.
  template <class P>
  void scores(const MatrixView<const P>& q, const MatrixView<const P>& k_t, float* dst,
              const Layout& s) const {
    const std::int64_t cols = num_cols(*this, s);
    product(q, cols_of(k_t, key, cols), MatrixView<float>{dst, rows, cols, ld()}, false);
  }
  template <class T>
  MatrixView<T> square(T* x) const {
    return {x, rows, keys, ld()};
  }
};

// Where a (rows, keys) operand of products is: f32 where it was computed, bf16 in a space of its
// own.
template <class P>
P* operand_of(float* f32, const Tensor& space) {
  if constexpr (std::is_same_v<P, float>) {
    return f32;
  } else {
    return space.data<P>();
  }
}

// What the largest of all tiles' products in bf16 needs.
std::int64_t product_scratch_nbytes(Products& products, const Layout& s, bool is_backward) {
  const std::int64_t d = s.head_size;
  std::int64_t most = 0;
  const auto consider = [&](const MatrixView<const BFloat16>& a,
                            const MatrixView<const BFloat16>& b, const MatrixView<float>& c,
                            bool accumulate) {
    most = std::max(most, gemm_scratch_nbytes(products, a, b, c, accumulate));
  };
  const TileShape shape = tile_shape<BFloat16>();
  for (std::int64_t row = 0; row < s.tokens; row += shape.rows) {
    const std::int64_t rows = std::min(shape.rows, s.tokens - row);
    const std::int64_t end = keys_end(s, row, rows);
    for (std::int64_t key = 0; key < end; key += shape.keys) {
      const ScoreTile tile{row, rows, key, std::min(shape.keys, end - key)};
      const std::int64_t cols = num_cols(tile, s);
      const MatrixView<const BFloat16> of_rows{nullptr, rows, d, d}, of_cols{nullptr, cols, d, d},
          of_keys{nullptr, tile.keys, d, d}, square{nullptr, rows, tile.keys, tile.ld()};
      consider(of_rows, of_cols.t(), {nullptr, rows, cols, tile.ld()}, false);
      consider(square, of_keys, {nullptr, rows, d, d}, key > 0);
      if (is_backward) consider(square.t(), of_rows, {nullptr, tile.keys, d, d}, true);
    }
  }
  return most;
}

// What products read instead of the tensors' bf16: see [Note: attention tiles].
struct Copies {
  Copies(const Tape& tape, const Layout& s, DType dtype, DType operand, bool is_backward) {
    const Memory& memory = tape.memory();
    tile = operand == DType::kBF16 ? tile_shape<BFloat16>() : tile_shape<float>();
    most_rows = std::max(tile.rows, kMostRows);
    if (operand == DType::kBF16) {
      rounded = scratch(memory, most_rows, tile.keys, operand);
      product = gemm_scratch(
          memory, product_scratch_nbytes(tape.stream().state<Products>(), s, is_backward));
    }
    if (operand == DType::kF32) {
      k_t = scratch(memory, s.head_size, s.tokens);
      if (is_backward) v_t = scratch(memory, s.head_size, s.tokens);
    }
    if (dtype == DType::kF32) return;
    k = scratch(memory, s.tokens, s.head_size, operand);
    v = scratch(memory, s.tokens, s.head_size, operand);
    q = scratch(memory, most_rows, s.head_size, operand);
  }
  TileShape tile;
  std::int64_t most_rows;
  Tensor k, v;      // (T, D) of one kv head
  Tensor k_t, v_t;  // (D, T), if products read f32
  Tensor q;         // (rows, D) of one head
  Tensor rounded;   // (rows, keys): probabilities
  Tensor product;   // of the products themselves
};

struct ForwardScratch : Copies {
  ForwardScratch(const Tape& tape, const Layout& s, DType dtype, DType operand)
      : Copies(tape, s, dtype, operand, /*is_backward=*/false),
        out(scratch(tape.memory(), most_rows, s.head_size)),
        scores(scratch(tape.memory(), most_rows, tile.keys)),
        largest(scratch(tape.memory(), 1, most_rows)),
        sum(scratch(tape.memory(), 1, most_rows)) {}
  Tensor out;           // (rows, D) of one head
  Tensor scores;        // (rows, keys)
  Tensor largest, sum;  // (rows) of the keys so far
};

// Queries [row, row + rows) of one head: assigns rows of y, and leaves the log-sum-exp in
// w.largest.
template <class P, class T>
void attend(Products& products, const Layout& s, std::int64_t row, const MatrixView<const P>& q,
            const MatrixView<const P>& k_t, const MatrixView<const P>& v, T* y,
            const ForwardScratch& w) {
  float* scores = w.scores.data<float>();
  float* out = w.out.data<float>();
  float* largest = w.largest.data<float>();
  float* sum = w.sum.data<float>();
  const MatrixView<float> sums{out, q.rows, s.head_size, s.head_size};
  const std::int64_t end = keys_end(s, row, q.rows);
  for (std::int64_t key = 0; key < end; key += w.tile.keys) {
    const std::int64_t keys = std::min(w.tile.keys, end - key);
    const Tile tile{{row, q.rows, key, keys}, products, w.product};
    P* const p = operand_of<P>(scores, w.rounded);
    tile.scores(q, k_t, scores, s);
    update_softmax(tile, s, scores, p, largest, sum, out, s.head_size);
    tile.product(tile.square<const P>(p), rows_of(v, key, tile.keys), sums, key > 0);
  }
  for (std::int64_t r = 0; r < q.rows; ++r) {
    store_row(y + r * s.y_width(), out + r * s.head_size, s.head_size, 1 / sum[r], false);
    largest[r] = softmax_lse(largest[r], sum[r], s.scale);
  }
}

// `lse` may be null.
template <class P, class T>
void forward(Products& products, const PartLayout& s, const T* qkv, T* y, float* lse,
             const ForwardScratch& w) {
  const std::int64_t d = s.head_size, ld = s.qkv_width();
  MatrixView<const P> k_t, v;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      if (h % s.group() == 0) {
        k_t = transposed_operand<P>(qkv + s.k_at(b, h / s.group()), s.tokens, d, ld,
                                    w.k_t.defined() ? w.k_t : w.k);
        v = operand<P>(qkv + s.v_at(b, h / s.group()), s.tokens, d, ld, w.v);
      }
      for (std::int64_t row = 0; row < s.tokens; row += w.tile.rows) {
        const std::int64_t rows = std::min(w.tile.rows, s.tokens - row);
        const auto q = operand<P>(qkv + s.q_at(b, h) + row * ld, rows, d, ld, w.q);
        attend(products, s, row, q, k_t, v, y + s.y_at(b, h) + row * s.y_width(), w);
        if (lse != nullptr) engine::cast(lse + s.lse_at(b, h) + row, w.largest.data<float>(), rows);
      }
    }
  }
}

struct BackwardScratch : Copies {
  BackwardScratch(const Tape& tape, const Layout& s, DType dtype, DType operand)
      : Copies(tape, s, dtype, operand, /*is_backward=*/true),
        dk(scratch(tape.memory(), s.tokens, s.head_size)),
        dv(scratch(tape.memory(), s.tokens, s.head_size)),
        dq(scratch(tape.memory(), most_rows, s.head_size)),
        delta(scratch(tape.memory(), 1, most_rows)),
        p(scratch(tape.memory(), most_rows, tile.keys)),
        ds(scratch(tape.memory(), most_rows, tile.keys)) {
    const Memory& memory = tape.memory();
    if (rounded.defined()) rounded_ds = scratch(memory, most_rows, tile.keys, rounded.dtype());
    if (dtype != DType::kF32) dy = scratch(memory, most_rows, s.head_size, operand);
  }
  Tensor dk, dv;      // (T, D) of one kv head
  Tensor dq;          // (rows, D) of one head
  Tensor delta;       // (rows)
  Tensor p, ds;       // (rows, keys)
  Tensor rounded_ds;  // (rows, keys)
  Tensor dy;          // (rows, D) of one head, if it is copied
};

// One head as products read it.
template <class P>
struct Operands {
  MatrixView<const P> q, dy;        // queries [row, row + rows)
  MatrixView<const P> k, k_t, v_t;  // all keys
};

// Queries [row, row + rows) of one head: assigns w.dq, adds to w.dk and w.dv.
template <class P>
void attend_backward(Products& products, const Layout& s, std::int64_t row, const Operands<P>& in,
                     const float* lse, const float* delta, const BackwardScratch& w) {
  const std::int64_t d = s.head_size, rows = in.q.rows;
  float* const p = w.p.data<float>();
  float* const ds = w.ds.data<float>();
  const Scores<P> scores{p, ds, operand_of<P>(p, w.rounded), operand_of<P>(ds, w.rounded_ds)};
  const MatrixView<float> dq{w.dq.data<float>(), rows, d, d};
  const std::int64_t end = keys_end(s, row, rows);
  for (std::int64_t key = 0; key < end; key += w.tile.keys) {
    const std::int64_t keys = std::min(w.tile.keys, end - key);
    const Tile tile{{row, rows, key, keys}, products, w.product};
    const auto k = rows_of(in.k, key, tile.keys);
    const MatrixView<float> dk{w.dk.data<float>() + key * d, tile.keys, d, d};
    const MatrixView<float> dv{w.dv.data<float>() + key * d, tile.keys, d, d};
    tile.scores(in.q, in.k_t, p, s);
    tile.scores(in.dy, in.v_t, ds, s);
    scores_backward(tile, s, scores, lse, delta);
    const auto dscores = tile.square<const P>(scores.ds_operand);
    tile.product(tile.square<const P>(scores.p_operand).t(), in.dy, dv, true);
    tile.product(dscores.t(), in.q, dk, true);
    tile.product(dscores, k, dq, key > 0);
  }
}

template <class P, class T>
void backward(Products& products, const PartLayout& s, const BackwardRows<T>& x,
              const BackwardScratch& w) {
  const auto& [qkv, y, lse, dy, dqkv, accumulate] = x;
  const std::int64_t d = s.head_size, ld = s.qkv_width(), y_ld = s.y_width();
  float* const delta = w.delta.data<float>();
  Operands<P> in;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t g = h / s.group();
      if (h % s.group() == 0) {
        in.k = operand<P>(qkv + s.k_at(b, g), s.tokens, d, ld, w.k);
        in.k_t = w.k_t.defined() ? transposed_operand<P>(qkv + s.k_at(b, g), s.tokens, d, ld, w.k_t)
                                 : in.k.t();
        in.v_t = transposed_operand<P>(qkv + s.v_at(b, g), s.tokens, d, ld,
                                       w.v_t.defined() ? w.v_t : w.v);
        for (const Tensor& sums : {w.dk, w.dv}) std::fill_n(sums.data<float>(), s.tokens * d, 0.0f);
      }
      for (std::int64_t row = 0; row < s.tokens; row += w.tile.rows) {
        const std::int64_t rows = std::min(w.tile.rows, s.tokens - row);
        const std::int64_t q_at = s.q_at(b, h) + row * ld, y_at = s.y_at(b, h) + row * y_ld;
        in.q = operand<P>(qkv + q_at, rows, d, ld, w.q);
        in.dy = operand<P>(dy + y_at, rows, d, y_ld, w.dy);
        row_deltas(s, rows, dy + y_at, y + y_at, y_ld, delta);
        attend_backward(products, s, row, in, lse + s.lse_at(b, h) + row, delta, w);
        store_rows(dqkv + q_at, ld, w.dq.data<float>(), d, rows, d, s.scale, accumulate);
      }
      if ((h + 1) % s.group() == 0) {
        store_rows(dqkv + s.k_at(b, g), ld, w.dk.data<float>(), d, s.tokens, d, s.scale,
                   accumulate);
        store_rows(dqkv + s.v_at(b, g), ld, w.dv.data<float>(), d, s.tokens, d, 1, accumulate);
      }
    }
  }
}

// What kernels read of documents: on the CPU their positions, on CUDA (2, B, T) i32, where they
// begin and end. Undefined: a row is one document.
Tensor make_documents(Tape& tape, const Tensor& positions) {
  if (!positions.defined() || !tape.stream().device().is_cuda()) return positions;
  Tensor documents =
      tape.empty({2, positions.dim(0), positions.dim(1)}, DType::kI32, "attention.documents");
  tape.stream().launch(
      {.name = "attention.documents",
       .bytes_read = positions.nbytes(),
       .bytes_written = documents.nbytes()},
      [] {}, [&](const auto& stream) { attention_documents_cuda(stream, documents, positions); });
  return documents;
}

std::int64_t nbytes_of(const Tensor& documents) {
  return documents.defined() ? documents.nbytes() : 0;
}

// For the sums of the columns of dqkv, if they are wanted and the kernels leave them.
Tensor empty_column_sums(const Tape& tape, const Layout& s, CudaAttention cuda,
                         const GradTarget& dqkv) {
  if constexpr (engine::kCudaBuilt) {
    if (dqkv.wants_column_sums)
      return empty_attention_sums(tape.stream(), tape.memory(), cuda, s, dqkv.dst.dtype());
  }
  return {};
}

// `documents`: of make_documents().
void launch_backward(Tape& tape, const Layout& s, CudaAttention cuda, const Tensor& documents,
                     const Tensor& qkv, const Tensor& y, const Tensor& lse, const Tensor& dy,
                     const GradTarget& dqkv) {
  const std::int64_t nbytes = qkv.nbytes();
  const auto w = host_scratch<BackwardScratch>(tape, s, qkv.dtype(), documents.defined());
  const auto pairs = pair_kernels(tape, s, qkv.dtype(), /*is_backward=*/true);
  const Tensor sums = empty_column_sums(tape, s, cuda, dqkv);
  tape.stream().launch(
      {.name = "attention.backward",
       .flops = flops(s, 5) + (sums.defined() ? static_cast<double>(qkv.numel()) : 0),
       .bytes_read = nbytes + y.nbytes() + dy.nbytes() + lse.nbytes() + nbytes_of(documents) +
                     (dqkv.accumulate ? nbytes : 0),
       .bytes_written = nbytes + (sums.defined() ? sums.nbytes() : 0)},
      [=, &products = tape.stream().state<Products>()] {
        dispatch(qkv.dtype(), documents.defined(), [&](auto t, auto p) {
          using T = decltype(t);
          for_each_document(
              s, documents, [&](const PartLayout& one, std::int64_t row, std::int64_t lse_at) {
                const std::int64_t qkv_at = row * s.qkv_width(), y_at = row * s.y_width();
                const BackwardRows<T> x{qkv.data<T>() + qkv_at,      y.data<T>() + y_at,
                                        lse.data<float>() + lse_at,  dy.data<T>() + y_at,
                                        dqkv.dst.data<T>() + qkv_at, dqkv.accumulate};
                if constexpr (std::is_same_v<T, BFloat16>) {
                  if (pairs) return pairs->backward(one, x);
                }
                backward<decltype(p)>(products, one, x, *w);
              });
        });
      },
      [&](const auto& stream) {
        attention_backward_cuda(stream, tape.memory(), cuda, s, documents, qkv, y, lse, dy,
                                dqkv.dst, dqkv.accumulate, sums);
      });
  if (sums.defined()) tape.leave_column_sums(dqkv.dst, sums);
}

}  // namespace

void require_attention_kernels(const engine::Stream& stream, CudaAttention kernels) {
  if (kernels != CudaAttention::kWgmma) return;
  engine::require(stream.device().is_cuda(), "[attention] expected a GPU for wgmma, got {}",
                  to_string(stream.device()));
  if constexpr (engine::kCudaBuilt) require_wgmma_cuda(stream);
}

Tensor attention(Tape& tape, const Tensor& qkv, const AttentionShape& shape) {
  const Layout s = check(qkv, shape, tape.stream().device());
  const bool saves = tape.needs_grad(qkv);
  const Tensor y = tape.empty({s.batch, s.tokens, s.y_width()}, qkv.dtype(), "attention");
  const Tensor lse =
      saves ? tape.empty({s.batch, s.heads, s.tokens}, DType::kF32, "attention.lse") : Tensor();
  const Tensor documents = make_documents(tape, shape.positions);
  const auto w = host_scratch<ForwardScratch>(tape, s, qkv.dtype(), documents.defined());
  const auto pairs = pair_kernels(tape, s, qkv.dtype(), /*is_backward=*/false);
  tape.stream().launch(
      {.name = "attention.forward",
       .flops = flops(s, 2),
       .bytes_read = qkv.nbytes() + nbytes_of(documents),
       .bytes_written = y.nbytes() + (saves ? lse.nbytes() : 0)},
      [=, &products = tape.stream().state<Products>()] {
        dispatch(qkv.dtype(), documents.defined(), [&](auto t, auto p) {
          using T = decltype(t);
          for_each_document(s, documents,
                            [&](const PartLayout& one, std::int64_t row, std::int64_t lse_at) {
                              const T* const x = qkv.data<T>() + row * s.qkv_width();
                              T* const to = y.data<T>() + row * s.y_width();
                              float* const lse_to = saves ? lse.data<float>() + lse_at : nullptr;
                              if constexpr (std::is_same_v<T, BFloat16>) {
                                if (pairs) return pairs->forward(one, x, to, lse_to);
                              }
                              forward<decltype(p)>(products, one, x, to, lse_to, *w);
                            });
        });
      },
      [&](const auto& stream) {
        attention_forward_cuda(stream, shape.cuda, s, documents, qkv, y, lse);
      });
  if (!saves) return y;
  tape.record("attention", y,
              [&tape, s, cuda = shape.cuda, documents, qkv, y, lse](const Tensor& dy) {
                if (const GradTarget dqkv = tape.grad_target(qkv))
                  launch_backward(tape, s, cuda, documents, qkv, y, lse, dy, dqkv);
              });
  return y;
}

}  // namespace tessera::ops
