// The last calls of each rank of a world, for whoever asks why it hangs or has failed.
//
//   const auto flight = std::make_shared<FlightRecorder>();
//   run_ranks(4, {.flight = flight}, ...);        // and, when that throws:
//   const FlightRecording recording = flight->read();
//
// A call takes a slot of a ring that was made with its world, so recording asks for no memory. What
// came of it is written by whichever thread finds out, until 1,000 later calls have taken its slot.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_recording.h"

namespace tessera::comm {

/// What a rank calls: all that must agree, in parts.
struct FlightCall {
  std::string_view op;          ///< static storage
  std::string_view dtype = {};  ///< static storage; empty: moves no tensor
  std::int64_t numel = 0;
  bool onto_sum = false;
  int root = -1;                ///< as a rank of the group; -1: none
  std::string_view label = {};  ///< kept up to FlightRing::kMaxLabel bytes
};

/// For whom calls of this process waited until all had come to them, as far as a backend can tell:
/// where ranks are processes that send messages. A call counts for the one that it waited longest
/// for, if for anyone.
struct FlightWaits {
  struct Wait {
    std::int64_t num_calls = 0, waited_ns = 0;
  };
  std::int64_t num_calls = 0;
  std::vector<Wait> by_rank;  ///< of the world, or empty
};

/// The calls of one rank. Thread-safe.
class FlightRing {
 public:
  static constexpr std::size_t kNumEntries = 1000;
  static constexpr std::size_t kMaxLabel = 64;

  /// The number under which enter() knows the call later.
  std::int64_t called(int group, std::int64_t sequence, const FlightCall& call) noexcept;
  /// Now; nothing if the slot has gone to a later call.
  void enter(std::int64_t number, FlightState state) noexcept;
  RankFlight read(int rank) const;

 private:
  struct Slot {
    FlightCall call;  // whose label is stored apart, in `label`
    std::array<char, kMaxLabel> label;
    std::uint8_t label_nbytes;
    FlightState state;
    int group;
    std::int64_t sequence, called_ns, started_ns, ended_ns;
  };
  mutable std::mutex mutex_;
  std::int64_t num_calls_ = 0;
  std::vector<Slot> slots_ = std::vector<Slot>(kNumEntries);  // of call n: n % kNumEntries
};

/// A recorded call, for whoever carries it out. Default constructed: of none, and does nothing.
class FlightTicket {
 public:
  FlightTicket() = default;
  FlightTicket(FlightRing& ring, std::int64_t number) : ring_(&ring), number_(number) {}
  void enter(FlightState state) const noexcept {
    if (ring_ != nullptr) ring_->enter(number_, state);
  }

 private:
  FlightRing* ring_ = nullptr;
  std::int64_t number_ = 0;
};

/// Of one world at a time. Thread-safe.
class FlightRecorder {
 public:
  FlightRecording read() const;
  FlightWaits waits() const;

  // For backends.

  /// The ring of rank `rank` of the world, made when it is first asked for.
  FlightRing& ring(int rank);
  /// The number of a new group.
  int add_group(std::string name, std::vector<int> members);
  /// The number of the group of that name, which is of no other group: a new one, if it is the
  /// first of its ranks here that asks.
  int only_group(const std::string& name, const std::vector<int>& members);
  /// A call of this process has met its peers, and waited longest for `rank` of the world, which is
  /// in a group here; -1: for nobody.
  void met(int rank, std::int64_t waited_ns) noexcept;
  /// The world has failed now.
  void fail() noexcept;

 private:
  int add_group_locked(std::string name, std::vector<int> members);

  mutable std::mutex mutex_;  // guards the rest, not what is in the rings
  std::vector<FlightGroup> groups_;
  std::map<int, std::unique_ptr<FlightRing>> rings_;
  std::int64_t failed_ns_ = 0;
  FlightWaits waits_;
};

}  // namespace tessera::comm
