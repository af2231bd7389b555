// What a flight recorder has kept of the last calls: see flight_recorder.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// Called: its stream has not come to it. Started: waits for its peers, or works with them. On a
/// GPU that thread ranks share memory of, finished means that all of them have enqueued it.
enum class FlightState : std::uint8_t { kCalled, kStarted, kFinished, kFailed };
/// "called", "started", "finished", "failed".
std::string_view name_of(FlightState state);

/// One call as it went. Times are std::chrono::steady_clock nanoseconds, 0 until then.
struct FlightEntry {
  int group = 0;              ///< number in FlightRecording::groups
  std::int64_t sequence = 0;  ///< among the calls of its group, as in messages
  std::string op, dtype, label;
  std::int64_t numel = 0;
  bool onto_sum = false;
  int root = -1;
  FlightState state = FlightState::kCalled;
  std::int64_t called_ns = 0, started_ns = 0, ended_ns = 0;

  friend bool operator==(const FlightEntry&, const FlightEntry&) = default;
};

struct FlightGroup {
  std::string name;          ///< not unique
  std::vector<int> members;  ///< as ranks of the world

  friend bool operator==(const FlightGroup&, const FlightGroup&) = default;
};

struct RankFlight {
  int rank = 0;
  std::int64_t num_calls = 0;        ///< since the world was made
  std::vector<FlightEntry> entries;  ///< the last of them, oldest first

  friend bool operator==(const RankFlight&, const RankFlight&) = default;
};

struct FlightRecording {
  std::int64_t now_ns = 0;
  std::int64_t failed_ns = 0;  ///< when the world failed; 0: it has not
  std::vector<FlightGroup> groups;
  std::vector<RankFlight> ranks;  ///< of this process, by rank

  friend bool operator==(const FlightRecording&, const FlightRecording&) = default;
};

}  // namespace tessera::comm
