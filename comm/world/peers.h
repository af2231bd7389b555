// What a process or a rank knows of the others, besides what moves their tensors.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::comm {

/// A peer is a process of a world, or each of its ranks is one, by its number. Thread-safe.
struct Peers {
  /// Whether a peer has ended in order, and calls no more.
  std::function<bool(int peer)> has_left = [](int) { return false; };
  /// As ProcessGroup::pause_deadline(), for all processes; null: for this one.
  std::function<std::shared_ptr<const void>()> pause = {};
  /// Told what this peer called last, so that others can say it should it be lost.
  std::function<void(std::string_view call)> say_call = [](std::string_view) {};
  /// Told that this peer calls no more, where its process may go on.
  std::function<void()> say_left = [] {};
  /// What a peer said that it called last; empty: nothing yet. Of one that has left: its last.
  std::function<std::string(int peer)> last_call = [](int) { return std::string(); };
};

}  // namespace tessera::comm
