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
struct MessageWorld : Peers {
  std::shared_ptr<World> world;
  std::shared_ptr<Transport> transport;
  /// By rank: the process of the transport where it is. Ascends.
  std::vector<int> process_of;
  /// The lowest number that this process has given to no group.
  std::atomic<int> next_group = 1;

  /// What ends before all of these: with it this process leaves.
  std::shared_ptr<const void> link = {};
};

}  // namespace tessera::comm
