// The tiles of a CPU with AMX, as PortableTiles has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#if !defined(__x86_64__)
#include "engine/gemm/portable_tiles.h"
#endif

namespace tessera::engine {

/// Asks Linux for the tiles, which it gives to a process that asked, before the first AmxTiles.
/// Throws InvalidArgument that ends with `asked_by` if this process's level is below Isa::kV4Amx,
/// or if Linux refuses.
void request_amx(std::string_view asked_by = "split");

#if defined(__x86_64__)

/// Tiles of the calling thread, from construction to destruction. As instructions and not the
/// compiler's intrinsics: those of GCC 12 hide that they read memory.
class AmxTiles {
 public:
  AmxTiles() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    const Config config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  /// The shape that tiles had before they have again, with zeros in them: a library may count on
  /// it. Mostly there was none, and then there is nothing to keep when threads change.
  ~AmxTiles() { asm volatile("ldtilecfg %0" : : "m"(before_)); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  void load(const void* src, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(src), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  void store(void* dst, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(dst), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kC, int kA, int kB>
  void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }

 private:
  struct Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_nbytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Config) == 64);

  Config before_;
};

#else

using AmxTiles = PortableTiles;  // which nobody uses: request_amx() throws

#endif

}  // namespace tessera::engine
