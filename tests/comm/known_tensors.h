// Tensors whose bytes are known from a seed, or from a rank.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "comm/process_group.h"
#include "engine/elementwise.h"
#include "engine/memory.h"
#include "engine/philox.h"
#include "engine/tensor.h"

namespace tessera::comm {

// The elements of a tensor on the host.
inline std::vector<std::byte> bytes_of(const engine::Tensor& t) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(t.nbytes()));
  t.copy_to_host(bytes.data());
  return bytes;
}

template <class T>
T at(const engine::Tensor& t, std::int64_t i) {
  T value;
  t.slice(i, {1}).copy_to_host(&value);
  return value;
}

// A different byte pattern for every seed.
inline void fill_bytes(const engine::Tensor& t, std::uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(t.nbytes()));
  std::uint64_t x = 0x9E3779B97F4A7C15u * (seed + 1);
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    x = (x ^ (x >> 29)) * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(bytes.data() + i, &x, std::min<std::size_t>(8, bytes.size() - i));
  }
  t.copy_from_host(bytes.data(), t.numel());
}

inline engine::Tensor pattern(const engine::Memory& memory, std::int64_t numel, engine::DType dtype,
                              std::uint64_t seed) {
  engine::Tensor t = engine::Tensor::empty(memory, {numel}, dtype, "pattern");
  fill_bytes(t, seed);
  return t;
}

// Equal bytes, wherever they are.
inline bool same_bytes(const engine::Tensor& a, const engine::Tensor& b) {
  return bytes_of(a) == bytes_of(b);
}

inline bool is_pattern(const engine::Tensor& t, std::uint64_t seed) {
  return same_bytes(t, pattern(engine::Memory(), t.numel(), t.dtype(), seed));
}

inline void upload(const engine::Tensor& dst, const engine::Tensor& src) {
  dst.copy_from_host(src.raw(), src.numel());
}

// Rank `rank`'s contribution number `step`: magnitudes differ so much that sums show their order.
inline engine::Tensor contribution(const engine::Memory& memory, std::int64_t numel,
                                   engine::DType dtype, int rank, int step = 0) {
  const auto stream = static_cast<std::uint64_t>(100 * step + rank);
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = engine::philox(7, i, stream);
    values[i] = std::ldexp(engine::RandomStream::to_uniform(bits[0]) - 0.5f, bits[1] % 12);
  }
  const engine::Tensor on_host =
      engine::Tensor::empty(engine::Memory(), {numel}, dtype, "contribution");
  engine::cast(on_host, engine::Tensor::from<float>(engine::Memory(), {numel}, values));
  const engine::Tensor t = engine::Tensor::empty(memory, {numel}, dtype, "contribution");
  upload(t, on_host);
  return t;
}

// The definition: one addition after the other, in the order of the ranks. On the host.
inline engine::Tensor serial_sum(std::int64_t numel, engine::DType dtype, int size,
                                 Accumulate accumulate) {
  const engine::Memory memory;
  std::vector<engine::Tensor> ins;
  for (int r = 0; r < size; ++r) ins.push_back(contribution(memory, numel, dtype, r));
  const engine::Tensor sum = contribution(memory, numel, engine::DType::kF32, 99);
  for (std::int64_t i = 0; i < numel; ++i) {
    volatile float x = sum.data<float>()[i];
    for (int r = 0; r < size; ++r) {
      const engine::Tensor& in = ins[static_cast<std::size_t>(r)];
      const float term = dtype == engine::DType::kF32 ? in.data<float>()[i]
                                                      : in.data<engine::BFloat16>()[i].to_float();
      x = r == 0 && accumulate == Accumulate::kNo ? term : x + term;
    }
    sum.data<float>()[i] = x;
  }
  return sum;
}

}  // namespace tessera::comm
