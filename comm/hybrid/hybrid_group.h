// Ranks as threads of several processes: those of a process share memory, and processes send each
// other messages, once for all of their ranks.
#pragma once

#include <memory>
#include <vector>

#include "comm/messages/message_world.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// The ranks that this process has in `world`, in their order, each used by one thread and its
/// streams. Calls between processes lie on CPU streams. Sums are in rank order. Groups that are
/// split from these take the shortest way: shared memory where all of their ranks are in one
/// process, messages alone where each is in another. A split throws InvalidArgument that would put
/// ranks of others between two ranks of one process.
std::vector<std::unique_ptr<ProcessGroup>> make_hybrid_groups(std::shared_ptr<MessageWorld> world);

}  // namespace tessera::comm
