#include "ops/dot_product_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "ops/add.h"
#include "ops/bmm.h"
#include "ops/dims/broadcast.h"
#include "ops/dims/permute.h"
#include "ops/elementwise/cast.h"
#include "ops/scale.h"
#include "ops/softmax/softmax.h"

namespace tessera::ops {

using engine::DType;
using engine::Shape;
using engine::Tape;
using engine::Tensor;

Tensor dot_product_attention(Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v,
                             const DotProductOptions& options) {
  const auto has_rank = [](const Tensor& x) { return x.shape().rank() == 4; };
  const bool fit = has_rank(q) && has_rank(k) && has_rank(v) && k.dim(0) == q.dim(0) &&
                   v.dim(0) == q.dim(0) && v.dim(1) == k.dim(1) && v.dim(2) == k.dim(2) &&
                   k.dim(3) == q.dim(3) && k.dim(2) > 0 && q.dim(2) % k.dim(2) == 0 &&
                   k.dtype() == q.dtype() && v.dtype() == q.dtype();
  engine::require(
      fit,
      "[dot_product_attention] expected q (B, T, H, D), k (B, S, KV, D) and v (B, S, KV, "
      "E) of one dtype and KV that divides H, got {} {}, {} {} and {} {}",
      name_of(q.dtype()), q.shape(), name_of(k.dtype()), k.shape(), name_of(v.dtype()), v.shape());
  engine::require(options.scale >= 0, "[dot_product_attention] expected scale >= 0, got {}",
                  options.scale);
  const std::int64_t B = q.dim(0), T = q.dim(1), H = q.dim(2), D = q.dim(3);
  const std::int64_t S = k.dim(1), KV = k.dim(2), E = v.dim(3), G = H / KV;
  const float factor = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<float>(D));

  engine::require(!options.mask.defined() || options.mask.dtype() == q.dtype(),
                  "[dot_product_attention] expected a mask {}, got {} ({})", name_of(q.dtype()),
                  name_of(options.mask.dtype()), options.mask.name());
  const int mask_rank = options.mask.defined() ? options.mask.shape().rank() : 2;
  engine::require(mask_rank == 2 || mask_rank == 5,
                  "[dot_product_attention] expected a mask (T, S) or (B, KV, H / KV, T, S), with 1 "
                  "where it is the same for all, got {} ({})",
                  options.mask.shape(), options.mask.name());
  const Shape shape{B, KV, G, T, S};

  // (B, KV, G, T, D) and (B, KV, S, ..): a product for each head of the keys.
  const Tensor scaled = scale(tape, q, factor).reshape({B, T, KV, G, D});
  const Tensor queries = permute(tape, scaled, {0, 2, 3, 1, 4});
  const Tensor keys = permute(tape, k, {0, 2, 1, 3}), values = permute(tape, v, {0, 2, 1, 3});
  Tensor scores = bmm(tape, queries.reshape({B * KV, G * T, D}), keys.reshape({B * KV, S, D}),
                      {.transpose_b = true});
  if (options.mask.defined()) {
    scores = add(tape, scores.reshape(shape), broadcast(tape, options.mask, shape));
  }
  const Tensor p = softmax(tape, scores.reshape({B * KV, G * T, S}));
  const Tensor y = bmm(tape, p, values.reshape({B * KV, S, E}));
  return permute(tape, y.reshape({B, KV, G, T, E}), {0, 3, 1, 2, 4}).reshape({B, T, H, E});
}

Tensor causal_mask(Tape& tape, std::int64_t T, std::int64_t S, DType dtype, std::int64_t window) {
  engine::require(T <= S && window >= 0,
                  "[causal_mask] expected at most as many queries as keys and window >= 0, got {} "
                  "queries, {} keys, window {}",
                  T, S, window);
  std::vector<float> values(static_cast<std::size_t>(T * S),
                            -std::numeric_limits<float>::infinity());
  for (std::int64_t t = 0; t < T; ++t) {
    const std::int64_t place = S - T + t, first = window > 0 ? place - window + 1 : 0;
    for (std::int64_t s = std::max<std::int64_t>(first, 0); s <= place; ++s)
      values[static_cast<std::size_t>(t * S + s)] = 0;
  }
  const Tensor mask = Tensor::from<float>(tape.memory(), {T, S}, values, "causal_mask");
  return cast(tape, mask, dtype);
}

}  // namespace tessera::ops
