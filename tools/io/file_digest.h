// What a file holds, in a word: for processes that must have read the same.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::tools {

/// Bytes that are read for a digest at most.
inline constexpr std::int64_t kMostDigestedNbytes = std::int64_t{1} << 24;

/// "1234 bytes 0123456789abcdef": how long the file is, and a checksum of all of it, or if it is
/// longer than `most_nbytes`, of 256 parts, evenly spaced, the first and the last among them. So
/// what differs between these is not seen. Throws IoError when the file cannot be read.
std::string digest_of_file(const std::string& path, std::int64_t most_nbytes = kMostDigestedNbytes);

}  // namespace tessera::tools
