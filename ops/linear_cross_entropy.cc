#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>

#include "engine/cuda.h"
#include "engine/elementwise.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/gemm_cuda.h"
#include "ops/cross_entropy.h"
#include "ops/cross_entropy_cuda.h"
#include "ops/cross_entropy_rows.h"

namespace tessera::ops {

using engine::BFloat16;
using engine::DeviceMatrix;
using engine::DType;
using engine::gemm_flops;
using engine::GradTarget;
using engine::MatrixView;
using engine::Memory;
using engine::multiplies_bf16;
using engine::Parameter;
using engine::Product;
using engine::Products;
using engine::Tape;
using engine::Tensor;

namespace {

// Rows of logits that live at one time: 8 MiB, but enough for the products to pay for reading w and
// updating its gradient as a whole with each chunk. A GPU fills its cores with 256 MiB, and
// multiplies in tiles of up to 128 rows; where each chunk adds to the gradient of w (`early`),
// which takes as long as to read and write that, 512 MiB makes little of it. Fewer, so that logits
// stay in its L2 cache, gain nothing: 256 rows of GPT-2's fit in 50 MB, w does not beside them, and
// to read w for each 256 rows moves as much as to write and read the logits.
std::int64_t choose_chunk_rows(std::int64_t row_nbytes, bool on_gpu, bool early) {
  if (!on_gpu) return std::clamp<std::int64_t>((std::int64_t{8} << 20) / row_nbytes, 256, 512);
  const std::int64_t nbytes = std::int64_t{early ? 512 : 256} << 20;
  return std::max<std::int64_t>(nbytes / row_nbytes / 128, 1) * 128;
}

// What backward finds saved unless the caller says how much. A GPU saves the logits of 64 sequences
// of GPT-2, 6 GiB of bf16; a CPU those of one, 196 MiB of f32, as to compute them again takes a
// good part of a step there.
std::int64_t choose_max_saved_numel(bool on_gpu) { return std::int64_t{1} << (on_gpu ? 32 : 26); }

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// [Note: vocabulary of odd size on a GPU]
// A row of logits begins at a multiple of 16 bytes, which the products want. For bf16 that may
// not do: tensor cores are fed 16 bytes at a time, and of a product with an extent that is no
// multiple of 8, whatever its leading dimension, cublasLt may fall back to kernels of an older
// GPU, three times slower. GPT-2 has 50,257 words. So where the vocabulary is no multiple of 8,
// products see the next multiple of 128, a tile, or if they are few words, of 8. w is read from
// a copy that ends in rows of 0; so in the further columns of the logits stands 0, which cross-
// entropy leaves alone and which is their gradient; and dw is summed in a workspace as long,
// whose further rows go nowhere. So w is copied in forward and backward, and dw read and written
// once more, a hundredth of the time of the products that run in fast kernels in return.
// Room after w in its flat buffer would cost no copy. But then layout, plan, reducers and
// checkpoints would know of rows that are none and must be 0, and a tensor that is in no flat
// buffer would still need the copy. To multiply the last 81 columns by themselves would read x
// and dx, 100 MB each, once more, which takes as long, and round dx twice.
constexpr std::int64_t kWord = 8, kTile = 128;

std::int64_t product_cols(std::int64_t vocab_size, DType dtype, bool on_gpu) {
  const bool pads = on_gpu && dtype == DType::kBF16 && vocab_size % kWord != 0;
  return pads ? round_up(vocab_size, vocab_size < 32 * kTile ? kWord : kTile) : vocab_size;
}

// The fused op: what its kernels read.
struct Head {
  Memory memory;
  CrossEntropyRows rows;
  Tensor x;  // (N, C) f32 or bf16
  Tensor w;  // (V, C) f32 or bf16
  // Undefined if nothing is saved. CPU: (N, V) f32, exp(logit - max). GPU: (N, ld), dtype of x,
  // softmax - onehot.
  Tensor saved;
  // On a GPU, if logits are not saved and these gradients are wanted: see [Note: the fused op on a
  // GPU]. early_dx (N, C) of the dtype of x, early_dw (cols, C) f32.
  Tensor early_dx, early_dw;
  std::int64_t width;
  std::int64_t chunk_rows;
  std::int64_t cols;  // of the logits, as products see them
  std::int64_t ld;    // of the logits

  double product_flops() const { return gemm_flops(rows.count(), rows.vocab_size, width); }
  bool is_early() const { return early_dx.defined() || early_dw.defined(); }
  Tensor chunk_space() const {
    return saved.defined() ? Tensor()
                           : cross_entropy_workspace(memory, chunk_rows, rows.vocab_size);
  }
  // Where the logits of the chunk that starts at row `first` live.
  MatrixView<float> chunk(std::int64_t first, const Tensor& space) const {
    float* data =
        saved.defined() ? saved.data<float>() + first * rows.vocab_size : space.data<float>();
    return {data, std::min(chunk_rows, rows.count() - first), rows.vocab_size, rows.vocab_size};
  }
  template <class T>
  MatrixView<const T> x_rows(std::int64_t first, std::int64_t num_rows) const {
    return {x.data<T>() + first * width, num_rows, width, width};
  }
};

// What products with x read w (V, C) as: itself, or widened once where the CPU does not multiply
// bf16.
bool widens_weight(const Head& head) {
  return head.w.dtype() == DType::kBF16 && (head.x.dtype() != DType::kBF16 || !multiplies_bf16());
}

// Calls `fn` with w as it is, or its copy `wide`.
template <class T, class F>
void with_weight(const Head& head, const Tensor& wide, F fn) {
  const std::int64_t rows = head.rows.vocab_size, cols = head.width;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (head.w.dtype() == DType::kBF16 && !widens_weight(head)) {
      return fn(matrix<const BFloat16>(head.w, rows, cols));
    }
  }
  fn(matrix<const float>(widens_weight(head) ? wide : head.w, rows, cols));
}

template <class A, class B, class C>
Product<A, B, C> product_of(MatrixView<const A> a, MatrixView<const B> b, MatrixView<C> c,
                            bool accumulate) {
  return {a, b, c, accumulate};
}

// The gradient of a chunk of logits as products read it.
template <class W>
MatrixView<const W> dlogits_of(const MatrixView<float>& chunk, const Tensor& narrow) {
  if constexpr (std::is_same_v<W, BFloat16>) {
    return {narrow.data<BFloat16>(), chunk.rows, chunk.cols, chunk.cols};
  } else {
    return chunk;
  }
}

// Scratch of the CPU, from before the launch.
struct HeadScratch {
  Tensor space;    // of a chunk of logits, unless they are saved
  Tensor wide;     // w, if widens_weight()
  Tensor narrow;   // of a chunk of dlogits in bf16, if such are multiplied
  Tensor sum;      // of dw, if that is not f32
  Tensor product;  // of the largest product

  HeadScratch(const Head& head, const GradTarget& dw, bool is_backward)
      : space(head.chunk_space()) {
    const std::int64_t vocab_size = head.rows.vocab_size;
    if (widens_weight(head)) wide = cross_entropy_workspace(head.memory, vocab_size, head.width);
    if (!is_backward) return;
    if (head.w.dtype() == DType::kBF16 && !widens_weight(head)) {
      narrow = cross_entropy_workspace(head.memory, head.chunk_rows, vocab_size, DType::kBF16);
    }
    if (dw && dw.dst.dtype() != DType::kF32) {
      sum = cross_entropy_workspace(head.memory, vocab_size, head.width);
    }
  }
};

// Calls fn(first, logits, product) for each chunk of rows.
template <class T, class F>
void for_each_forward_product(const Head& head, const HeadScratch& s, F fn) {
  with_weight<T>(head, s.wide, [&](auto w) {
    for (std::int64_t first = 0; first < head.rows.count(); first += head.chunk_rows) {
      const MatrixView<float> logits = head.chunk(first, s.space);
      fn(first, logits, product_of(head.x_rows<T>(first, logits.rows), w.t(), logits, false));
    }
  });
}

template <class T>
void head_forward(const Head& head, const HeadScratch& s, Products& products, float* loss) {
  const CrossEntropyRows& rows = head.rows;
  if (s.wide.defined()) engine::cast(s.wide, head.w);
  double sum = 0;
  for_each_forward_product<T>(
      head, s, [&](std::int64_t first, const MatrixView<float>& logits, const auto& product) {
        product.run(products, s.product);
        for (std::int64_t i = 0; i < logits.rows; ++i)
          sum += rows.forward(first + i, logits.data + i * logits.ld);
      });
  *loss = static_cast<float>(sum * rows.row_weight());
}

// Chunk by chunk: run(product) of the logits unless they are saved, gradients(first, chunk), and
// run(product) of dx and dw.
template <class T, class Gradients, class Run>
void for_each_backward_product(const Head& head, const HeadScratch& s, const GradTarget& dx,
                               const GradTarget& dw, Gradients gradients, Run run) {
  const bool in_place = dw && !s.sum.defined();
  with_weight<T>(head, s.wide, [&](auto w) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w.data)>>;
    for (std::int64_t first = 0; first < head.rows.count(); first += head.chunk_rows) {
      const MatrixView<float> chunk = head.chunk(first, s.space);
      const auto x = [&] { return head.x_rows<T>(first, chunk.rows); };  // saved where it is needed
      if (!head.saved.defined()) run(product_of(x(), w.t(), chunk, false));
      gradients(first, chunk);
      const MatrixView<const W> dlogits = dlogits_of<W>(chunk, s.narrow);
      if (dx) {
        const MatrixView<T> dx_rows{dx.dst.data<T>() + first * head.width, chunk.rows, head.width,
                                    head.width};
        run(product_of(dlogits, w, dx_rows, dx.accumulate));
      }
      if (dw) {
        run(product_of(dlogits.t(), x(),
                       matrix<float>(in_place ? dw.dst : s.sum, head.rows.vocab_size, head.width),
                       first > 0 || (in_place && dw.accumulate)));
      }
    }
  });
}

// The gradient of the logits is rounded to bf16 where the CPU multiplies bf16.
template <class T>
void head_backward(const Head& head, const HeadScratch& s, Products& products, float dloss,
                   const GradTarget& dx, const GradTarget& dw) {
  const CrossEntropyRows& rows = head.rows;
  if (s.wide.defined()) engine::cast(s.wide, head.w);
  const auto scale = static_cast<float>(dloss * rows.row_weight());
  const auto gradients = [&](std::int64_t first, const MatrixView<float>& chunk) {
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      float* row = chunk.data + i * chunk.ld;
      if (!head.saved.defined()) rows.exponentials(first + i, row);
      rows.gradient(first + i, row, scale);
      if (s.narrow.defined())
        engine::cast(s.narrow.data<BFloat16>() + i * chunk.cols, row, chunk.cols);
    }
  };
  for_each_backward_product<T>(head, s, dx, dw, gradients,
                               [&](const auto& product) { product.run(products, s.product); });
  if (s.sum.defined()) engine::assign_or_add(dw.dst, s.sum, dw.accumulate);
}

// On the CPU: with room for the largest of the products that for_each_product(T{}, scratch, fn)
// calls fn with.
template <class F>
std::optional<HeadScratch> head_scratch(const Tape& tape, const Head& head, const GradTarget& dw,
                                        bool is_backward, F for_each_product) {
  if (tape.stream().device().is_cuda()) return std::nullopt;
  HeadScratch s(head, dw, is_backward);
  auto& products = tape.stream().state<Products>();
  std::int64_t most = 0;
  engine::dispatch_float(head.x.dtype(), "cross_entropy", [&](auto t) {
    for_each_product(t, s, [&](const auto& product) {
      most = std::max(most, product.scratch_nbytes(products));
    });
  });
  s.product = gemm_scratch(head.memory, most);
  return s;
}

// On a GPU ----------------------------------------------------------------------------------------
// Templates, so that they need not exist in a build without CUDA.
//
// [Note: the fused op on a GPU]
// Logits are of the dtype of x and become dlogits where they stand: bf16 logits are written once,
// and read and written once by the cross-entropy. They are rounded to bf16 before the softmax, as
// PyTorch's are under autocast; what that costs stands in the header.
// dloss is not known to the host, nor in forward. So dlogits are made for dloss = 1 and without the
// weight of the mean; what they lack is a factor of the products. Forward saves them; or, where
// they are too many, multiplies those of a chunk at once and forgets them, so that no logits are
// computed twice. What backward then has to do is to multiply dx and dw, made early, with the
// factor: dx is rounded once more, dw, which stays f32, is not.

// Rows [first, first + count) of logits.
[[maybe_unused]] DeviceMatrix logits_rows(const Head& head, const Tensor& t, std::int64_t first,
                                          std::int64_t count) {
  return DeviceMatrix{t.raw(), t.dtype(), first + count, head.cols, head.ld}.slice(first, count);
}

// w as products read it, (cols, C): see [Note: vocabulary of odd size on a GPU].
template <class GpuStream>
Tensor product_weight(const GpuStream& stream, const Head& head) {
  if (head.cols == head.rows.vocab_size) return head.w;
  const Tensor copy = cross_entropy_workspace(head.memory, head.cols, head.width, head.w.dtype());
  engine::cuda::copy(stream, copy.raw(), head.w.raw(), head.w.nbytes());
  engine::cuda::fill(stream, copy.raw() + head.w.nbytes(), 0, copy.nbytes() - head.w.nbytes());
  return copy;
}

template <class GpuStream>
void compute_logits(const GpuStream& stream, const Head& head, const Tensor& w, std::int64_t first,
                    const DeviceMatrix& logits) {
  const DeviceMatrix x = device_matrix(head.x, head.rows.count(), head.width);
  gemm_cuda(stream, head.memory,
            {.a = x.slice(first, logits.rows),
             .b = device_matrix(w, head.cols, head.width).t(),
             .c = logits});
}

// dx = (or +=) dlogits w, dw = (or +=) dlogits^T x, of rows from `first` on; where a matrix has no
// data, not that one. `scales` as engine::DeviceProduct has them.
struct HeadProducts {
  DeviceMatrix dx = {}, dw = {};  // (N, C), (cols, C)
  bool adds_to_dx = false, adds_to_dw = false;
  const float* scales = nullptr;
};
template <class GpuStream>
void multiply_dlogits(const GpuStream& stream, const Head& head, const Tensor& w,
                      std::int64_t first, const DeviceMatrix& dlogits, const HeadProducts& p) {
  if (p.dx.data != nullptr) {
    gemm_cuda(stream, head.memory,
              {.a = dlogits,
               .b = device_matrix(w, head.cols, head.width),
               .c = p.dx.slice(first, dlogits.rows),
               .accumulate = p.adds_to_dx,
               .scales = p.scales});
  }
  if (p.dw.data != nullptr) {
    gemm_cuda(stream, head.memory,
              {.a = dlogits.t(),
               .b = device_matrix(head.x, head.rows.count(), head.width).slice(first, dlogits.rows),
               .c = p.dw,
               .accumulate = p.adds_to_dw,
               .scales = p.scales});
  }
}

// `t` as (rows, C), or nothing where there is none.
[[maybe_unused]] DeviceMatrix matrix_or_none(const Tensor& t, std::int64_t rows,
                                             std::int64_t cols) {
  return t.defined() ? device_matrix(t, rows, cols) : DeviceMatrix();
}

template <class GpuStream>
void head_forward_cuda(const GpuStream& stream, const Head& head, const Tensor& loss) {
  const CrossEntropyRows& rows = head.rows;
  const bool saves = head.saved.defined();
  const Tensor row_losses = cross_entropy_workspace(head.memory, 1, rows.count());
  const Tensor space =
      saves ? head.saved
            : cross_entropy_workspace(head.memory, head.chunk_rows, head.ld, head.x.dtype());
  const Tensor w = product_weight(stream, head);
  HeadProducts early{.dx = matrix_or_none(head.early_dx, rows.count(), head.width),
                     .dw = matrix_or_none(head.early_dw, head.cols, head.width)};
  for (std::int64_t first = 0; first < rows.count(); first += head.chunk_rows) {
    const std::int64_t count = std::min(head.chunk_rows, rows.count() - first);
    const DeviceMatrix logits = logits_rows(head, space, saves ? first : 0, count);
    compute_logits(stream, head, w, first, logits);
    cross_entropy_forward_cuda(stream, rows, first, logits, row_losses.data<float>() + first,
                               saves || head.is_early() ? &logits : nullptr);
    if (head.is_early()) multiply_dlogits(stream, head, w, first, logits, early);
    early.adds_to_dw = true;
  }
  cross_entropy_mean_cuda(stream, rows, row_losses.data<float>(), loss.data<float>());
}

template <class GpuStream>
void head_backward_cuda(const GpuStream& stream, const Head& head, const Tensor& dloss,
                        const GradTarget& dx, const GradTarget& dw) {
  const CrossEntropyRows& rows = head.rows;
  const Tensor scales = cross_entropy_workspace(head.memory, 1, 3);
  cross_entropy_scales_cuda(stream, rows, dloss.data<float>(), scales.data<float>());
  const auto write = [&](const GradTarget& to, const Tensor& from, const float* scale) {
    engine::cuda::assign_or_add(stream, to.dst.raw(), to.dst.dtype(), from.raw(), from.dtype(),
                                to.dst.numel(), to.accumulate, scale);
  };
  if (head.is_early()) {
    if (dx) write(dx, head.early_dx, scales.data<float>());
    if (dw) write(dw, head.early_dw, scales.data<float>());
    return;
  }
  // In f32, and rounded once.
  const bool direct = dw && head.cols == rows.vocab_size;
  const Tensor sum =
      !dw || direct ? dw.dst : cross_entropy_workspace(head.memory, head.cols, head.width);
  multiply_dlogits(stream, head, dx ? product_weight(stream, head) : Tensor(), 0,
                   logits_rows(head, head.saved, 0, rows.count()),
                   {.dx = matrix_or_none(dx.dst, rows.count(), head.width),
                    .dw = matrix_or_none(sum, head.cols, head.width),
                    .adds_to_dx = dx.accumulate,
                    .adds_to_dw = direct && dw.accumulate,
                    .scales = scales.data<float>()});
  if (dw && !direct) write(dw, sum, nullptr);
}

void launch_head_backward(const Tape& tape, const Head& head, const Tensor& dloss,
                          const GradTarget& dx, const GradTarget& dw, const std::string& name) {
  const std::int64_t dx_nbytes = dx ? dx.dst.nbytes() : 0, dw_nbytes = dw ? dw.dst.nbytes() : 0;
  if (head.is_early()) {
    tape.stream().launch(
        {.name = "linear_cross_entropy.backward",
         .flops = static_cast<double>((dx ? dx.dst.numel() : 0) + (dw ? dw.dst.numel() : 0)),
         .bytes_read = (dx ? head.early_dx.nbytes() : 0) + (dw ? head.early_dw.nbytes() : 0) +
                       (dx.accumulate ? dx_nbytes : 0) + (dw.accumulate ? dw_nbytes : 0),
         .bytes_written = dx_nbytes + dw_nbytes,
         .detail = name},
        [] {}, [&](const auto& stream) { head_backward_cuda(stream, head, dloss, dx, dw); });
    return;
  }
  const bool recompute = !head.saved.defined();
  const int products = (dx ? 1 : 0) + (dw ? 1 : 0) + (recompute ? 1 : 0);
  const auto scratch = head_scratch(
      tape, head, dw, /*is_backward=*/true, [&](auto t, const HeadScratch& s, auto fn) {
        for_each_backward_product<decltype(t)>(
            head, s, dx, dw, [](std::int64_t, const MatrixView<float>&) {}, fn);
      });
  tape.stream().launch(
      {.name = "linear_cross_entropy.backward",
       .flops = products * head.product_flops() + head.rows.backward_flops(recompute),
       .bytes_read = (dw || recompute ? head.x.nbytes() : 0) +
                     (dx || recompute ? head.w.nbytes() : 0) + head.rows.targets.nbytes() +
                     head.rows.stats.nbytes() + (recompute ? 0 : head.saved.nbytes()) +
                     (dx.accumulate ? dx_nbytes : 0) + (dw.accumulate ? dw_nbytes : 0),
       .bytes_written = dx_nbytes + dw_nbytes,
       .detail = name},
      [=, &products = tape.stream().state<Products>()] {
        engine::dispatch_float(head.x.dtype(), "cross_entropy", [&](auto t) {
          head_backward<decltype(t)>(head, *scratch, products, *dloss.data<float>(), dx, dw);
        });
      },
      [&](const auto& stream) { head_backward_cuda(stream, head, dloss, dx, dw); });
}

}  // namespace

Tensor linear_cross_entropy(Tape& tape, const Tensor& x, Parameter& w, const Tensor& targets,
                            const LinearCrossEntropyOptions& options) {
  const Tensor value = tape.use(w);
  engine::require(value.shape().rank() == 2 && value.numel() > 0 && value.dim(1) == x.dim(-1),
                  "[cross_entropy] expected a weight (V, {}), got {} ({})", x.dim(-1),
                  value.shape(), w.name);
  engine::require(options.chunk_rows >= 0,
                  "[cross_entropy] expected chunk_rows of at least 0, got {}", options.chunk_rows);
  const std::int64_t vocab_size = value.dim(0);
  CrossEntropyRows rows =
      make_cross_entropy_rows(tape, x, targets, vocab_size, options.ignore_index, /*is_mean=*/true);
  rows.is_sum = options.is_sum;
  const bool on_gpu = tape.stream().device().is_cuda();
  const DType dtype = on_gpu ? x.dtype() : DType::kF32;  // of the logits
  const std::int64_t cols = product_cols(vocab_size, dtype, on_gpu),
                     ld = on_gpu ? round_up(cols, kWord) : cols;
  const std::int64_t max_saved_numel =
      options.max_saved_numel < 0 ? choose_max_saved_numel(on_gpu) : options.max_saved_numel;
  const bool wants_dx = tape.needs_grad(x), wants_dw = tape.needs_grad(w);
  const bool saves = (wants_dx || wants_dw) && rows.count() <= max_saved_numel / vocab_size;
  const bool early = on_gpu && !saves && (wants_dx || wants_dw);
  const std::int64_t chunk_rows =
      std::min(rows.count(), options.chunk_rows == 0
                                 ? choose_chunk_rows(ld * engine::size_of(dtype), on_gpu, early)
                                 : options.chunk_rows);
  const auto room = [&](bool wanted, const engine::Shape& shape, DType of, const char* name) {
    return wanted ? tape.empty(shape, of, name) : Tensor();
  };
  const Head head{
      .memory = tape.memory(),
      .rows = rows,
      .x = x,
      .w = value,
      .saved = room(saves, {rows.count(), ld}, dtype, "cross_entropy.saved"),
      .early_dx = room(early && wants_dx, x.shape(), dtype, "cross_entropy.dx"),
      .early_dw = room(early && wants_dw, {cols, x.dim(-1)}, DType::kF32, "cross_entropy.dw"),
      .width = x.dim(-1),
      .chunk_rows = chunk_rows,
      .cols = cols,
      .ld = ld};
  const double early_products =
      (head.early_dx.defined() ? 1 : 0) + (head.early_dw.defined() ? 1 : 0);
  const std::int64_t kept_nbytes = (saves ? head.saved.nbytes() : 0) +
                                   (head.early_dx.defined() ? head.early_dx.nbytes() : 0) +
                                   (head.early_dw.defined() ? head.early_dw.nbytes() : 0);
  const Tensor loss = tape.empty({}, DType::kF32, "cross_entropy");
  const auto scratch = head_scratch(
      tape, head, /*dw=*/{}, /*is_backward=*/false, [&](auto t, const HeadScratch& s, auto fn) {
        for_each_forward_product<decltype(t)>(
            head, s,
            [&](std::int64_t, const MatrixView<float>&, const auto& product) { fn(product); });
      });
  tape.stream().launch(
      {.name = "linear_cross_entropy.forward",
       .flops = (1 + early_products) * head.product_flops() + rows.forward_flops() +
                (early ? rows.backward_flops(/*exponentials=*/false) : 0),
       .bytes_read = x.nbytes() + value.nbytes() + targets.nbytes(),
       .bytes_written = rows.stats.nbytes() + loss.nbytes() + kept_nbytes,
       .detail = w.name},
      [=, &products = tape.stream().state<Products>()] {
        rows.check_targets();
        engine::dispatch_float(x.dtype(), "cross_entropy", [&](auto t) {
          head_forward<decltype(t)>(head, *scratch, products, loss.data<float>());
        });
      },
      [&](const auto& stream) { head_forward_cuda(stream, head, loss); });
  if (!wants_dx && !wants_dw) return loss;
  Head back = head;
  if (early || (saves && !wants_dw)) back.x = x.without_data();
  if (early) back.w = value.without_data();
  tape.record("linear_cross_entropy", loss, [&tape, &w, head = back](const Tensor& dloss) {
    const GradTarget dx = tape.grad_target(head.x), dw = tape.grad_target(w);
    if (dx || dw) launch_head_backward(tape, head, dloss, dx, dw, w.name);
  });
  return loss;
}

}  // namespace tessera::ops
