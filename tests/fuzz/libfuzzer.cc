// A target as libFuzzer calls it. An exception ends the process, which is a finding.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/target.h"

// NOLINTNEXTLINE(readability-identifier-naming): the name that libFuzzer calls
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  tessera::fuzz::is_accepted({reinterpret_cast<const char*>(data), nbytes});
  return 0;
}
