#include "ops/dropout.h"

#include <algorithm>
#include <array>

#include "ops/dropout_cuda.h"
#include "ops/pointwise.h"
#include "ops/vector_math.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::RandomStream;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

constexpr std::int64_t kChunk = 256;  // elements whose random bits are made at once

// The smallest 24-bit number whose uniform value is at least p: uniform() grows with it, so that
// comparing integers gives the very same mask.
std::uint32_t threshold_of(float p) {
  std::uint32_t low = 0, high = 1u << 24;
  while (low < high) {
    const std::uint32_t middle = (low + high) / 2;
    if (RandomStream::to_uniform(middle << 8) >= p) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>((std::uint64_t{a} * b) >> 32);
}

// words[i] = random.bits(4 first_block + i): engine::philox for many blocks at once, one array a
// word so that compilers vectorise over blocks.
void random_words(const RandomStream& random, std::uint64_t first_block,
                  std::array<std::uint32_t, kChunk>& words) {
  constexpr std::size_t kBlocks = kChunk / 4;
  std::array<std::uint32_t, kBlocks> c0, c1, c2, c3;
  for (std::size_t b = 0; b < kBlocks; ++b) {
    c0[b] = static_cast<std::uint32_t>(first_block + b);
    c1[b] = static_cast<std::uint32_t>((first_block + b) >> 32);
    c2[b] = static_cast<std::uint32_t>(random.stream);
    c3[b] = static_cast<std::uint32_t>(random.stream >> 32);
  }
  auto k0 = static_cast<std::uint32_t>(random.seed);
  auto k1 = static_cast<std::uint32_t>(random.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::size_t b = 0; b < kBlocks; ++b) {
      const std::uint32_t high0 = high_product(0xD2511F53u, c0[b]), low0 = 0xD2511F53u * c0[b];
      const std::uint32_t high1 = high_product(0xCD9E8D57u, c2[b]), low1 = 0xCD9E8D57u * c2[b];
      c0[b] = high1 ^ c1[b] ^ k0;
      c1[b] = low1;
      c2[b] = high0 ^ c3[b] ^ k1;
      c3[b] = low0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (std::size_t b = 0; b < kBlocks; ++b) {
    words[4 * b] = c0[b];
    words[4 * b + 1] = c1[b];
    words[4 * b + 2] = c2[b];
    words[4 * b + 3] = c3[b];
  }
}

// out[i] = or += in[i] scale, or 0 where the mask drops it.
template <class T>
void apply(T* out, bool accumulate, const T* in, std::int64_t numel, const DropoutMask& mask) {
  std::array<std::uint32_t, kChunk> words;
  auto skip = static_cast<std::int64_t>(mask.first_index % 4);  // of the first block
  std::uint64_t block = mask.first_index / 4;
  for (std::int64_t begin = 0; begin < numel; block += kChunk / 4) {
    random_words(mask.random, block, words);
    const std::int64_t count = std::min(numel - begin, kChunk - skip);
    write_elements(out + begin, count, accumulate,
                   [in = in + begin, w = words.data() + skip, scale = mask.scale,
                    threshold = mask.threshold](std::int64_t i) {
                     return select(w[i] >> 8 >= threshold, to_f32(in[i]) * scale, 0.0f);
                   });
    begin += count;
    skip = 0;
  }
}

// out = or += the elements of `in` that the mask keeps, scaled.
void launch_mask(const Tape& tape, std::string_view name, const GradTarget& out, const Tensor& in,
                 const DropoutMask& mask) {
  tape.stream().launch(
      {.name = name,
       .flops = static_cast<double>(in.numel()) * (out.accumulate ? 2 : 1),
       .bytes_read = in.nbytes() * (out.accumulate ? 2 : 1),
       .bytes_written = in.nbytes()},
      [=] {
        engine::dispatch_float(in.dtype(), "dropout", [&](auto t) {
          using T = decltype(t);
          apply(out.dst.data<T>(), out.accumulate, in.data<T>(), in.numel(), mask);
        });
      },
      [=](const auto& stream) { dropout_cuda(stream, out, in, mask); });
}

}  // namespace

Tensor dropout(Tape& tape, const Tensor& x, float p, RandomStream random, std::uint64_t first_index,
               const IndexOffset& offset) {
  engine::require(p >= 0 && p < 1, "[dropout] expected a probability in [0, 1), got {} ({})", p,
                  x.name());
  if (p == 0) return x;
  engine::require(!offset.count.defined() || (offset.count.device().is_cuda() &&
                                              offset.count.device() == tape.stream().device()),
                  "[dropout] expected an offset of indices on the GPU of the tape only, got one on "
                  "{} with a tape on {} ({})",
                  offset.count.defined() ? to_string(offset.count.device()) : "",
                  to_string(tape.stream().device()), x.name());
  const DropoutMask mask{random,
                         first_index,
                         threshold_of(p),
                         1 / (1 - p),
                         offset.count.defined() ? offset.count.data<std::int64_t>() : nullptr,
                         offset.numel};
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(x.shape(), x.dtype(), "dropout");
  launch_mask(tape, "dropout.forward", {y}, x, mask);
  if (!wants_dx) return y;
  tape.record("dropout", y, [&tape, x = x.without_data(), mask](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x))
      launch_mask(tape, "dropout.backward", dx, dy, mask);
  });
  return y;
}

}  // namespace tessera::ops
