// What a process knows of the others, besides what moves their tensors.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::comm {

/// Of the processes of a world, which go by their numbers: where each has one rank, rank r is
/// process r. Thread-safe.
struct Peers {
  /// Whether a process has ended in order, and calls no more.
  std::function<bool(int process)> has_left = [](int) { return false; };
  /// As ProcessGroup::pause_deadline(), for all processes; null: for this one.
  std::function<std::shared_ptr<const void>()> pause = {};
  /// Told what this process called last, so that others can say it should it be lost.
  std::function<void(std::string_view call)> say_call = [](std::string_view) {};
  /// What a process said that it called last; empty: nothing yet. Of one that has left: its last.
  std::function<std::string(int process)> last_call = [](int) { return std::string(); };
};

}  // namespace tessera::comm
