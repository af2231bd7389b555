#include "tools/planning/require_memory.h"

#include <optional>

#include "engine/error.h"
#include "tools/report/step_text.h"

namespace tessera::tools {

void require_memory(std::int64_t nbytes, std::string_view whose, std::string_view advice,
                    const MachineLimits& limits) {
  const auto text = [](std::int64_t n) { return nbytes_text(static_cast<double>(n)); };
  const std::optional<MemoryRoom> room = limits.memory_room();
  if (!room || nbytes <= room->nbytes) return;
  engine::fail<engine::DeviceError>(
      "[memory] expected {} of memory for {}, got {} that are free: {} {}; {}", text(nbytes), whose,
      text(room->nbytes), room->limited_by(), text(room->limit_nbytes), advice);
}

}  // namespace tessera::tools
