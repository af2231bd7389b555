// A group in which each rank is a process: they send each other messages, on memory of the host.
#pragma once

#include <memory>

#include "comm/messages/message_rank.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// `rank`, which stands for one rank of the world, as each of its group. Its calls lie on CPU
/// streams. Sums are in rank order.
std::unique_ptr<ProcessGroup> make_message_group(std::shared_ptr<MessageRank> rank);

}  // namespace tessera::comm
