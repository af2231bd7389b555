// The ranks of a world as processes that send each other messages, on memory of the host.
#pragma once

#include <memory>

#include "comm/messages/message_world.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// This process's rank of the group of all. Its calls lie on CPU streams. Sums are in rank order.
std::unique_ptr<ProcessGroup> make_message_group(std::shared_ptr<MessageWorld> world);

}  // namespace tessera::comm
