// Numbers of bytes as people write them.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::tools {

/// "40GiB", "1.5 GB", "700MiB", "12345" (bytes). Throws InvalidArgument naming `option`.
std::int64_t parse_nbytes(std::string_view text, std::string_view option);

}  // namespace tessera::tools
