#include "engine/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tessera::engine {
namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros where the CPU does not know the leaf.
Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

constexpr bool has(unsigned bits, unsigned mask) { return (bits & mask) == mask; }

// What registers the operating system keeps.
unsigned enabled_state() {
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Isa detect() {
  constexpr unsigned kOsxsave = 1u << 27, kFma = 1u << 12, kMovbe = 1u << 22, kF16c = 1u << 29,
                     kLzcnt = 1u << 5, kBmi = 1u << 3, kAvx2 = 1u << 5, kBmi2 = 1u << 8;
  constexpr unsigned kAvx512 =
      1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;              // F DQ CD BW VL
  constexpr unsigned kAvx512Bf16 = 1u << 5, kAmx = 1u << 22 | 1u << 24;  // AMX-BF16, AMX-TILE
  constexpr unsigned kYmm = 0x6, kZmm = 0xE0, kTiles = 0x60000;
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1),
                  amd = cpuid(0x80000001u, 0);
  if (!has(basic.ecx, kOsxsave)) return Isa::kV2;
  const unsigned state = enabled_state();
  if (!has(state, kYmm) || !has(basic.ecx, kFma | kMovbe | kF16c) || !has(amd.ecx, kLzcnt) ||
      !has(extended.ebx, kBmi | kAvx2 | kBmi2)) {
    return Isa::kV2;
  }
  if (!has(state, kZmm) || !has(extended.ebx, kAvx512)) return Isa::kV3;
  if (!has(more.eax, kAvx512Bf16)) return Isa::kV4;
  return has(state, kTiles) && has(extended.edx, kAmx) ? Isa::kV4Amx : Isa::kV4Bf16;
}

#else

Isa detect() { return Isa::kV2; }

#endif

}  // namespace

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::kV2:
      return "v2";
    case Isa::kV3:
      return "v3";
    case Isa::kV4:
      return "v4";
    case Isa::kV4Bf16:
      return "v4+bf16";
    case Isa::kV4Amx:
      return "v4+amx";
  }
  return "";
}

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa internal::decide_isa(Isa isa) {
  static const Isa level = isa;
  return level;
}

Isa isa() {
  static const Isa level = internal::decide_isa(best_isa());
  return level;
}

}  // namespace tessera::engine
