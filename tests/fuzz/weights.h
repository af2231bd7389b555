// A file of safetensors whose header's length and number of bytes are as they should be.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"

namespace tessera::fuzz {

/// Writes `header` and then zeros, as many as `nbytes` says in digits.
inline void write_weights(const testing::TempFolder& folder, std::string_view name,
                          std::string_view header, std::string_view nbytes) {
  constexpr std::int64_t kMaxNbytes = 1 << 16;
  const auto length = std::bit_cast<std::array<char, 8>>(std::uint64_t{header.size()});
  std::string file(length.data(), length.size());
  file += header;
  file.append(static_cast<std::size_t>(std::clamp<std::int64_t>(number_in(nbytes), 0, kMaxNbytes)),
              '\0');
  folder.write(name, file);
}

}  // namespace tessera::fuzz
