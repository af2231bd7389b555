// One process of a group of processes: its calls, whatever they move. See messages.h.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/messages/fingerprint.h"
#include "comm/messages/group_process.h"
#include "comm/messages/message_world.h"
#include "comm/world/call.h"
#include "comm/world/declared.h"
#include "comm/world/ranks_text.h"

namespace tessera::comm {

class MessageRank {
 public:
  /// This process's place in a group of `processes`, in the order of their ranks, where it is one
  /// rank as seen from here, whatever number of ranks share it. `name` is for messages. `flight`:
  /// records its calls; null: nobody does.
  MessageRank(std::shared_ptr<MessageWorld> shared, std::string name,
              std::vector<GroupProcess> processes, FlightRecorder* flight);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(processes_.size()); }
  /// The ranks of the world that rank `rank` here stands for, and the first of them.
  const std::vector<int>& ranks(int rank) const { return at(rank).ranks; }
  int world_rank(int rank) const { return ranks(rank).front(); }
  World& world() const { return *shared_->world; }
  const std::shared_ptr<MessageWorld>& shared() const { return shared_; }
  const std::vector<GroupProcess>& processes() const { return processes_; }

  /// This rank's next call. In the order of calls, by one thread.
  Call next_call(const FlightCall& what, std::string text);

  /// A number for a new group.
  std::int32_t next_number() const { return shared_->next_group++; }

  // As in ProcessGroup.

  void declare(std::string_view what);
  void barrier(std::string_view label);
  struct Part {
    std::string name;
    std::vector<GroupProcess> processes;
  };
  Part split(int color, int key);

 private:
  friend class Messages;

  // A tag is a group's number, a call's, and whether it carries data.
  static constexpr std::uint32_t kNumCalls = 1U << 10;
  static constexpr std::uint32_t kNumGroups =
      Transport::kNumTags / kNumCalls / 2 - 1;  // one tag is join()'s

  const GroupProcess& at(int rank) const { return processes_[static_cast<std::size_t>(rank)]; }
  void came_to(int rank, const Fingerprint& call);
  bool has_left(int rank) const { return shared_->peers.has_left(at(rank).process); }
  /// Adds those of the world that `rank` stands for.
  void add_absent(int rank, bool departed, std::vector<AbsentRank>& absent) const;

  const std::shared_ptr<MessageWorld> shared_;
  const std::string name_;
  const std::vector<GroupProcess> processes_;
  const int rank_, num_ranks_;
  FlightRing* ring_ = nullptr;  // null: nothing is recorded
  int flight_group_ = 0;
  std::int64_t sequence_ = 0;
  Declared declared_;
  mutable std::mutex mutex_;
  std::vector<std::optional<Fingerprint>> last_;  // by rank: the last call it came to
};

}  // namespace tessera::comm
