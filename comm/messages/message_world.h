// What all groups of a world of processes share.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "comm/transport/transport.h"
#include "comm/world/peers.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// One process's part of a world of processes, each of which has one rank or several. Thread-safe.
struct MessageWorld {
  MessageWorld() = default;
  ~MessageWorld() {
    if (transport && world && world->has_failed()) transport->give_up();
  }
  MessageWorld(const MessageWorld&) = delete;
  MessageWorld& operator=(const MessageWorld&) = delete;

  std::shared_ptr<World> world;
  std::shared_ptr<Transport> transport;
  /// After the transport, whose end waits for the others: they are told first that this one leaves.
  Peers peers = {};
  /// By rank: the process of the transport where it is. Ascends.
  std::vector<int> process_of;
  /// The lowest number that this process has given to no group.
  std::atomic<int> next_group = 1;

  /// What carries failures.
  std::shared_ptr<const void> link = {};
};

}  // namespace tessera::comm
