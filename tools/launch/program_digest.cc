#include "tools/launch/program_digest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/xxh3.h"

namespace tessera::tools {

std::string program_digest() {
  const engine::InputFile program("/proc/self/exe");
  std::vector<std::byte> piece(std::size_t{1} << 18);
  engine::Xxh3 hash;
  for (std::int64_t at = 0; at < program.nbytes(); at += std::ssize(piece)) {
    const std::int64_t n = std::min(std::ssize(piece), program.nbytes() - at);
    const auto bytes = std::span(piece).first(static_cast<std::size_t>(n));
    program.read(at, bytes);
    hash.update(bytes);
  }
  return fmt::format("{:016x}", hash.value());
}

}  // namespace tessera::tools
