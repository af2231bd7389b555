// One process of a group of processes: its calls, and how they are compared, whatever they move.
//
// [Note: a fingerprint ahead of the data] Engines that send messages notice neither swapped calls
// nor unequal counts: they give wrong numbers. So each call begins with a message of fixed size to
// every other process of the group, and no data is taken before all of theirs have come and are
// equal: short data may be sent along, and is then kept apart until they are. It carries what was
// declared since the last one, too. Messages of a call have a tag of their own, made of the group's
// number and the call's: calls of one group that lie on several streams do not take each other's,
// and a rank that calls something else is found by the number. Tags come again after 1024 calls: a
// call that waits on one stream while so many others of its group go on meanwhile is found to
// differ, and fails. Each process numbers its groups by itself, as its threads may make several at
// once, and whoever sends to it uses its number.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/messages/group_process.h"
#include "comm/messages/message_world.h"
#include "comm/world/call.h"
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

  /// The messages of one call, in the thread that carries it out: first meet(), then what the call
  /// moves. All of them, and `owner`, stay until they are done. Those of one lane from one rank to
  /// another arrive in order.
  class Messages {
   public:
    Messages(MessageRank& rank, const Call& call, std::shared_ptr<const void> owner);
    ~Messages();
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    enum Lane : std::uint32_t { kAhead, kMoves };

    /// Waits until every rank has made the same call. Throws CommError, and fails the world, if one
    /// has made another, has left, or does not come in time.
    void meet();
    /// After meet(), in a split: what each rank of the group says of itself, of which this process
    /// has `own`.
    std::vector<SplitPlace> exchange(std::span<const SplitPlace> own);

    // To and from another rank of the group. Nothing is moved for no bytes. What they return, one
    // can wait() for. Before meet() they may be called as well, with at most kShortNbytes, which
    // then take no time of their own.

    static constexpr std::int64_t kShortNbytes = 16 << 10;
    std::size_t send(int rank, const void* bytes, std::int64_t nbytes, Lane lane = kMoves);
    std::size_t receive(int rank, void* bytes, std::int64_t nbytes, Lane lane = kMoves);
    /// Until all of these are done. Throws CommError, and fails the world, if one does not end.
    void wait() {
      await([](int) {});
    }
    /// Until this one is done, as wait(), before which it is called.
    void wait(std::size_t message);

   private:
    struct Posted {
      int rank;
      bool sends;
      std::unique_ptr<Transfer> transfer;  // null: it is done
      // Of what was received before meet(): where it is until then, and where it belongs.
      std::shared_ptr<const std::vector<std::byte>> early = {};
      void* place = nullptr;
    };
    std::size_t post(int rank, bool sends, Lane lane, std::span<std::byte> bytes,
                     const std::shared_ptr<const void>& owner);
    void await(const std::function<void(int rank)>& received);
    void await_one(std::size_t i, DeadlineClock::time_point limit);
    bool is_done(Posted& posted, std::chrono::milliseconds time);
    /// The other ends of what is not done, from posted_[first] on; `departed`: that have left.
    std::vector<AbsentRank> pending_ranks(std::size_t first, bool departed);
    std::string where() const;
    /// Others may be about to tell why. Throws that, or that `rank` has left; none for -1.
    void wait_for_word(std::chrono::milliseconds time, int rank = -1);
    [[noreturn]] void expire(std::size_t first);
    [[noreturn]] void fail_without(const std::vector<AbsentRank>& left);
    [[noreturn]] void fail_at(int rank, std::string_view why);
    [[noreturn]] void fail(std::string message);

    MessageRank& rank_;
    const Call& call_;
    const std::shared_ptr<const void> owner_;
    const int num_exceptions_ = std::uncaught_exceptions();
    bool has_met_ = false;
    std::vector<Posted> posted_;
  };

  // As in ProcessGroup.

  void declare(std::string_view what);
  void barrier(std::string_view label);
  struct Part {
    std::string name;
    std::vector<GroupProcess> processes;
  };
  Part split(int color, int key);

 private:
  // A tag is a group's number, a call's, and whether it carries data.
  static constexpr std::uint32_t kNumCalls = 1U << 10;
  static constexpr std::uint32_t kNumGroups =
      Transport::kNumTags / kNumCalls / 2 - 1;  // one tag is join()'s

  const GroupProcess& at(int rank) const { return processes_[static_cast<std::size_t>(rank)]; }
  std::string last_of(int rank) const;
  void came_to(int rank, std::string call);
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
  std::string declared_;  // since the last call
  mutable std::mutex mutex_;
  std::vector<std::string> last_;  // by rank: the last call it came to
};

}  // namespace tessera::comm
