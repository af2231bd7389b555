// A group whose ranks are all threads of one process, for worlds that may have other processes.
#pragma once

#include <functional>
#include <memory>

#include "comm/process_group.h"
#include "comm/threads/thread_ranks.h"

namespace tessera::comm {

/// Rank `rank` of `group`. `pause`: as ProcessGroup::pause_deadline(); null: that of its world.
std::unique_ptr<ProcessGroup> make_threads_group(
    std::shared_ptr<Rendezvous> group, int rank, ThreadRank::Kind kind,
    std::function<std::shared_ptr<const void>()> pause = nullptr);

}  // namespace tessera::comm
