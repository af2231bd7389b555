// Philox 4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011). Value i of a stream is a pure function of (seed, stream, i): it does not
// depend on ranks, sharding, order or device.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "engine/box_muller.h"

namespace tessera::engine {

/// One block of four 32-bit words for `key` at the 128-bit counter (lo, hi).
constexpr std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t lo,
                                              std::uint64_t hi) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  auto c0 = static_cast<std::uint32_t>(lo), c1 = static_cast<std::uint32_t>(lo >> 32);
  auto c2 = static_cast<std::uint32_t>(hi), c3 = static_cast<std::uint32_t>(hi >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

/// FNV-1a, 64 bits: names to stream ids, plans to hashes.
constexpr std::uint64_t fnv1a(std::string_view text, std::uint64_t hash = 0xCBF29CE484222325ull) {
  for (const char c : text) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001B3ull;
  }
  return hash;
}

/// A random sequence addressed by global element index.
struct RandomStream {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;  ///< tells apart tensors and uses, e.g. fnv1a("h.0.drop") ^ step

  constexpr std::uint32_t bits(std::uint64_t index) const {
    return philox(seed, index / 4, stream)[index % 4];
  }
  /// In (0, 1), never 0 or 1: 23 random bits, so that the sum below is exact.
  static constexpr float to_uniform(std::uint32_t bits) {
    return (static_cast<float>(bits >> 9) + 0.5f) * 0x1.0p-23f;
  }
  constexpr float uniform(std::uint64_t index) const { return to_uniform(bits(index)); }
  /// Standard normal by Box-Muller; elements 2k and 2k+1 share a pair of words.
  constexpr float normal(std::uint64_t index) const { return normals(index / 4)[index % 4]; }
  /// Elements 4 block to 4 block + 3.
  constexpr std::array<float, 4> normals(std::uint64_t block) const {
    const auto words = philox(seed, block, stream);
    const CosSin a = box_muller(to_uniform(words[0]), to_uniform(words[1]));
    const CosSin b = box_muller(to_uniform(words[2]), to_uniform(words[3]));
    return {static_cast<float>(a.cos), static_cast<float>(a.sin), static_cast<float>(b.cos),
            static_cast<float>(b.sin)};
  }
};

}  // namespace tessera::engine
