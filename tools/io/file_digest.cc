#include "tools/io/file_digest.h"

#include <fmt/format.h>

#include <cstddef>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/xxh3.h"

namespace tessera::tools {

std::string digest_of_file(const std::string& path, std::int64_t most_nbytes) {
  constexpr std::int64_t kNumParts = 256;
  const engine::InputFile file(path);
  const std::int64_t nbytes = file.nbytes(), part = most_nbytes / kNumParts;
  engine::Xxh3 sum;
  std::vector<std::byte> bytes;
  const auto add = [&](std::int64_t offset, std::int64_t length) {
    bytes.resize(static_cast<std::size_t>(length));
    file.read(offset, bytes);
    sum.update(bytes);
  };
  if (nbytes <= most_nbytes || part == 0) {
    add(0, nbytes);
  } else {
    const std::int64_t between = (nbytes - part) / (kNumParts - 1);
    for (std::int64_t i = 0; i < kNumParts - 1; ++i) add(i * between, part);
    add(nbytes - part, part);
  }
  return fmt::format("{} bytes {:016x}", nbytes, sum.value());
}

}  // namespace tessera::tools
