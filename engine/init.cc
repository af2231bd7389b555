#include "engine/init.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/dtype.h"
#include "engine/error.h"

namespace tessera::engine {

namespace {

constexpr std::int64_t kBlock = 4;

template <class T>
void write_values(const Init& init, const RandomStream& random, T* dst, std::int64_t begin,
                  std::int64_t numel) {
  for (std::int64_t i = begin; i < begin + numel;) {
    const std::int64_t block = i / kBlock;
    const std::array<float, 4> values = init.values(random, static_cast<std::uint64_t>(block));
    const std::int64_t end = std::min((block + 1) * kBlock, begin + numel);
    for (; i < end; ++i) store_f32(dst[i - begin], values[static_cast<std::size_t>(i % kBlock)]);
  }
}

RandomStream random_of(std::string_view name, std::uint64_t seed) { return {seed, fnv1a(name)}; }

}  // namespace

void Init::write(float* dst, std::int64_t begin, std::int64_t numel, std::string_view name,
                 std::uint64_t seed) const {
  write_values(*this, random_of(name, seed), dst, begin, numel);
}

std::string Init::str() const {
  switch (kind) {
    case Kind::kZeros:
      return "zeros";
    case Kind::kOnes:
      return "ones";
    case Kind::kNormal:
      return fmt::format("normal {}", scale);
    case Kind::kUniform:
      return fmt::format("uniform {}", scale);
  }
  return "?";
}

Stream init_stream(const Memory& memory) {
  const auto& home = memory.home();
  return home && home->device().is_cuda() ? *home : Stream::inline_cpu("init");
}

void launch_init(const Stream& stream, const Init& init, const Tensor& dst, std::int64_t begin,
                 std::string_view name, std::uint64_t seed) {
  const RandomStream random = random_of(name, seed);
  stream.launch(
      {.name = "init", .bytes_written = dst.nbytes(), .detail = std::string(name)},
      [=] {
        dispatch_float(dst.dtype(), "init", [&](auto t) {
          write_values(init, random, dst.data<decltype(t)>(), begin, dst.numel());
        });
      },
      [&](const auto& cuda_stream) {
        cuda::init(cuda_stream, init, random, dst.raw(), dst.dtype(), begin, dst.numel());
      });
}

}  // namespace tessera::engine
