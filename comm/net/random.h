// Numbers that nobody can guess.
#pragma once

#include <cstddef>
#include <span>

namespace tessera::comm::net {

/// Fills `bytes`, at most 256. Throws IoError.
void draw(std::span<std::byte> bytes);

}  // namespace tessera::comm::net
