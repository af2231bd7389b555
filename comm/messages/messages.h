// The messages of one call of a group of processes, and how the call is compared, whatever it
// moves.
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
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/messages/message_rank.h"
#include "comm/transport/transport.h"
#include "comm/world/ranks_text.h"

namespace tessera::comm {

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

  /// Before meet(): of the ranks of this process, `world_rank` came last to the call, and the
  /// others have waited for it.
  void came_last(int world_rank, std::chrono::nanoseconds waited) {
    last_here_ = {world_rank, waited};
  }

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
  int late_rank(int rank, const Fingerprint& his) const;
  std::string where() const;
  [[noreturn]] void expire(std::size_t first);
  [[noreturn]] void fail_without(const std::vector<AbsentRank>& left);
  [[noreturn]] void fail_at(int rank, std::string_view why);
  [[noreturn]] void fail(std::string message);

  MessageRank& rank_;
  const Call& call_;
  const std::shared_ptr<const void> owner_;
  const int num_exceptions_ = std::uncaught_exceptions();
  struct {
    int rank = -1;  // none
    std::chrono::nanoseconds waited{0};
  } last_here_;
  bool has_met_ = false;
  std::vector<Posted> posted_;
};

}  // namespace tessera::comm
