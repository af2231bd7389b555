// For tests of code that a CPU with AMX leaves aside: linked in, it has such a CPU do as one
// without would, unless the environment says what to take.
#include <stdlib.h>

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tessera::testing {
namespace {

bool has_amx() {
#if defined(__x86_64__)
  constexpr unsigned kAmx = 1u << 22 | 1u << 24;  // AMX-BF16, AMX-TILE
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmx) == kAmx;
#else
  return false;
#endif
}

// Before anybody asks engine::isa(), which looks once.
[[maybe_unused]] const bool kIsSet = [] {
  const char* const asked = std::getenv("TESSERA_CPU_ISA");
  const bool is_free = asked == nullptr || std::string_view(asked) == "auto" || *asked == '\0';
  return is_free && has_amx() && ::setenv("TESSERA_CPU_ISA", "v4+bf16", 1) == 0;
}();

}  // namespace
}  // namespace tessera::testing
