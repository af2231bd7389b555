#include "engine/gemm/amx_tiles.h"

#include "engine/error.h"
#include "engine/isa.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

namespace tessera::engine {

void request_amx(std::string_view asked_by) {
  require(isa() >= Isa::kV4Amx, "[gemm] expected a CPU with AMX (v4+amx) for split, got {} ({})",
          name_of(isa()), asked_by);
#if defined(__x86_64__)
  // Also refused where a thread has a signal stack too small for tiles.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  require(syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0,
          "[gemm] expected Linux to give this process the tiles of AMX for split, got {} "
          "({})",
          std::strerror(errno), asked_by);
#endif
}

}  // namespace tessera::engine
