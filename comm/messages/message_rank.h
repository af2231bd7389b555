// One rank of a group of processes: its calls, and how they are compared, whatever they move.
//
// [Note: a fingerprint ahead of the data] Engines that send messages notice neither swapped calls
// nor unequal counts: they give wrong numbers. So each call begins with a message of fixed size to
// every other rank of the group, and no data is taken before all of theirs have come and are equal:
// short data may be sent along, and is then kept apart until they are. It carries what was declared
// since the last one, too. Messages of a call have a tag of
// their own, made of the group's number and the call's: calls of one group that lie on several
// streams do not take each other's, and a rank that calls something else is found by the number.
// Tags come again after 1024 calls: a call that waits on one stream while so many others of its
// group go on beside it is found to differ, and fails.
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
#include "comm/messages/message_world.h"
#include "comm/world/call.h"
#include "comm/world/ranks_text.h"

namespace tessera::comm {

class MessageRank {
 public:
  /// `rank` of the group whose ranks are `members` of the world. `number` is the group's, equal on
  /// all of its ranks. `name` is for messages.
  MessageRank(std::shared_ptr<MessageWorld> shared, std::string name, std::vector<int> members,
              int rank, int number);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  World& world() const { return *shared_->world; }
  const std::shared_ptr<MessageWorld>& shared() const { return shared_; }

  /// This rank's next call. In the order of calls, by one thread.
  Call next_call(const FlightCall& what, std::string text);

  /// What a rank says of itself in a split.
  struct Place {
    std::int32_t color, key, next_group;
  };

  /// The messages of one call, in the thread that carries it out: first meet(), then what the call
  /// moves. All of them, and `owner`, stay until they are done.
  class Messages {
   public:
    Messages(MessageRank& rank, const Call& call, std::shared_ptr<const void> owner);
    ~Messages();
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    /// Waits until every rank has made the same call, and returns what each says. Throws CommError,
    /// and fails the world, if one has made another, has left, or does not come in time.
    std::vector<Place> meet(const Place& own = {});

    // To and from another rank of the group. Nothing is moved for no bytes. What they return, one
    // can wait() for. Before meet() they may be called as well, with at most kShortNbytes, which
    // then take no time of their own.

    static constexpr std::int64_t kShortNbytes = 16 << 10;
    std::size_t send(int rank, const void* bytes, std::int64_t nbytes);
    std::size_t receive(int rank, void* bytes, std::int64_t nbytes);
    /// Until all of these are done. Throws CommError, and fails the world, if one does not end.
    void wait() {
      await([](int) {});
    }
    /// Until this one is done, as wait(), before which it is called.
    void wait(std::size_t message);

   private:
    enum Phase : std::uint32_t { kMeets, kMoves };
    struct Posted {
      int rank;
      bool sends;
      std::unique_ptr<Transfer> transfer;  // null: it is done
      // Of what was received before meet(): where it is until then, and where it belongs.
      std::shared_ptr<const std::vector<std::byte>> early = {};
      void* place = nullptr;
    };
    std::size_t post(int rank, bool sends, std::uint32_t phase, std::span<std::byte> bytes,
                     const std::shared_ptr<const void>& owner);
    void await(const std::function<void(int rank)>& received);
    void await_one(std::size_t i, DeadlineClock::time_point limit);
    bool is_done(Posted& posted, std::chrono::milliseconds time);
    /// The other ends of what is not done, from posted_[first] on; `departed`: that have left.
    std::vector<AbsentRank> pending_ranks(std::size_t first, bool departed);
    bool has_left(int rank) const;
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
    std::vector<int> members;  ///< as ranks of the world
    int rank = 0, number = 0;
  };
  Part split(int color, int key);

 private:
  struct Fingerprint;

  std::string last_of(int rank) const;
  void came_to(int rank, const Fingerprint& fingerprint);

  const std::shared_ptr<MessageWorld> shared_;
  const std::string name_;
  const std::vector<int> members_;
  const int rank_, number_;
  FlightRing* ring_ = nullptr;  // null: nothing is recorded
  int flight_group_ = 0;
  std::int64_t sequence_ = 0;
  std::string declared_;  // since the last call
  mutable std::mutex mutex_;
  std::vector<std::string> last_;  // by rank: the last call it came to
};

}  // namespace tessera::comm
