// What crosses between the processes of a group, for plans.
#pragma once

#include <cstdint>
#include <span>

#include "comm/process_group.h"

namespace tessera::comm {

/// Bytes that all processes of a group together send each other for `c`, besides fingerprints.
/// `num_ranks`: that each of them has of the group. 0 where there is one process.
std::int64_t bytes_between_processes(const Collective& c, std::span<const int> num_ranks);

}  // namespace tessera::comm
