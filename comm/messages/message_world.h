// What all groups of a world of processes share.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "comm/transport/transport.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// One process's part of a world in which each rank is a process: rank r is process r of the
/// transport. Thread-safe.
struct MessageWorld {
  std::shared_ptr<World> world;
  std::shared_ptr<Transport> transport;
  /// Whether a rank has ended in order, and calls no more.
  std::function<bool(int rank)> has_left = [](int) { return false; };
  /// As ProcessGroup::pause_deadline(), for all processes; null: for this one.
  std::function<std::shared_ptr<const void>()> pause = {};
  /// Told what this rank called last, so that others can say it should it be lost.
  std::function<void(std::string_view call)> say_call = [](std::string_view) {};

  /// The lowest number that no group of this process has had.
  std::mutex mutex = {};
  int next_group = 1;

  /// What ends before all of these: with it this rank leaves.
  std::shared_ptr<const void> link = {};
};

}  // namespace tessera::comm
