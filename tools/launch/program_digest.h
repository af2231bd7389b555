// Which build of the program this is.
#pragma once

#include <string>

namespace tessera::tools {

/// A hash of the bytes of the program that runs, 16 hexadecimal digits: equal builds have equal
/// ones, on whatever host. Libraries that it loads are not part of it. Throws IoError.
std::string program_digest();

}  // namespace tessera::tools
