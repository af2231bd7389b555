// How parameters start. Element i is a pure function of (seed, name, i), with the same bits on
// every machine, CPU or GPU: see engine/box_muller.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/memory.h"
#include "engine/philox.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::engine {

struct Init {
  enum class Kind { kZeros, kOnes, kNormal, kUniform };
  Kind kind = Kind::kZeros;
  float scale = 0;  ///< standard deviation, or bound of the uniform distribution [-scale, scale]

  std::string str() const;  ///< "normal 0.02"
  static Init zeros() { return {}; }
  static Init ones() { return {Kind::kOnes, 0}; }
  static Init normal(float stddev) { return {Kind::kNormal, stddev}; }
  static Init uniform(float bound) { return {Kind::kUniform, bound}; }

  /// Elements 4 block to 4 block + 3 of what `random` is the stream of.
  constexpr std::array<float, 4> values(const RandomStream& random, std::uint64_t block) const {
    switch (kind) {
      case Kind::kZeros:
        return {0, 0, 0, 0};
      case Kind::kOnes:
        return {1, 1, 1, 1};
      case Kind::kNormal: {
        const std::array<float, 4> n = random.normals(block);
        return {scale * n[0], scale * n[1], scale * n[2], scale * n[3]};
      }
      case Kind::kUniform: {
        const auto bits = philox(random.seed, block, random.stream);
        const auto of = [&](std::size_t i) {
          return scale * (2 * RandomStream::to_uniform(bits[i]) - 1);
        };
        return {of(0), of(1), of(2), of(3)};
      }
    }
    return {};
  }

  /// Writes elements [begin, begin + numel) of the parameter called `name`.
  void write(float* dst, std::int64_t begin, std::int64_t numel, std::string_view name,
             std::uint64_t seed) const;
};

/// Where to launch_init() what lies in `memory`: its home on a GPU, else the calling thread.
Stream init_stream(const Memory& memory);
/// dst = elements [begin, begin + dst.numel()) of the parameter called `name`, as work of `stream`,
/// on its device. `dst`: f32 or bf16.
void launch_init(const Stream& stream, const Init& init, const Tensor& dst, std::int64_t begin,
                 std::string_view name, std::uint64_t seed);

namespace cuda {

/// launch_init() of raw memory on a GPU. Defined where CUDA is built.
void init(const Stream& stream, const Init& init, const RandomStream& random, std::byte* dst,
          DType dtype, std::int64_t begin, std::int64_t numel);

}  // namespace cuda

}  // namespace tessera::engine
