// What all groups of a world of processes share.
#pragma once

#include <memory>
#include <mutex>

#include "comm/transport/transport.h"
#include "comm/world/peers.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// One process's part of a world in which each rank is a process: rank r is process r of the
/// transport. Thread-safe.
struct MessageWorld : Peers {
  std::shared_ptr<World> world;
  std::shared_ptr<Transport> transport;
  /// The lowest number that no group of this process has had.
  std::mutex mutex = {};
  int next_group = 1;

  /// What ends before all of these: with it this rank leaves.
  std::shared_ptr<const void> link = {};
};

}  // namespace tessera::comm
