// Whether this machine's memory holds what a program is about to take: beyond its limits the kernel
// ends a process without a word.
#pragma once

#include <cstdint>
#include <string_view>

#include "tools/machine/limits.h"

namespace tessera::tools {

/// Throws DeviceError with both figures if `whose`, such as "the model", takes more `nbytes` than
/// there are, and `advice`, such as "try a smaller model". Nothing where the machine tells no
/// limit.
void require_memory(std::int64_t nbytes, std::string_view whose, std::string_view advice,
                    const MachineLimits& limits = read_limits());

}  // namespace tessera::tools
