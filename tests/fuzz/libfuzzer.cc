// A target as libFuzzer calls it. An exception ends the process, which is a finding.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  tessera::fuzz::is_accepted({reinterpret_cast<const char*>(data), nbytes});
  return 0;
}
