// What backends share whose ranks are processes, or threads of several that compare their calls as
// processes do.
//
// [Note: a hash of all calls] A process cannot see what the others call. So each rank keeps a hash
// of all its calls, and at every host call and agree() the ranks exchange it, with their last calls
// as text: all of them find the same difference and name the same two sides. A difference may keep
// the exchange itself from ending. Then what each says that it called last, which all know a moment
// later, names both sides; or that a rank has left without the call that others are in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/processes/exchange.h"
#include "comm/world/call.h"
#include "comm/world/peers.h"
#include "comm/world/ranks_text.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// One rank of a group of processes: its calls, and how they are compared, whatever moves the
/// tensors.
class ProcessRank {
 public:
  /// `rank` of the group whose ranks are `members` of the world, and which are the `peers`. `name`:
  /// of no other group. The exchange outlives this, and every rank gives it record_nbytes() bytes.
  ProcessRank(std::shared_ptr<World> world, Peers peers, std::string name, std::vector<int> members,
              int rank, Exchange& exchange);

  static std::size_t record_nbytes();
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  const std::string& name() const { return name_; }

  /// This rank's next call, for the ranks to compare.
  Call announce(const FlightCall& what, std::string text);
  /// To be called again and again, by any thread, while `call`, which was announced, goes on.
  /// Fails the world if it is late, or cannot end because a rank has left without it or calls
  /// something else; whether so.
  bool watch(const Call& call, bool is_late);
  /// Compares what was agreed on, if all ranks have answered.
  void check();

  // As in ProcessGroup.

  void agree(const engine::Stream& stream);
  void declare(std::string_view what);
  void barrier(std::string_view label);

  /// What the first rank of a part tells the others, at most kMaxMessage bytes.
  using Message = std::vector<std::byte>;
  static constexpr std::size_t kMaxMessage = 256;
  struct Part {
    std::string name;
    std::vector<int> members;  ///< as ranks of the world
    int rank = 0;
    Message message = {};  ///< kMaxMessage bytes
  };
  /// As ProcessGroup::split(): `message` is called on the first rank of each part.
  Part split(int color, int key, const std::function<Message()>& message);

 private:
  struct Record;

  Call next_call(const FlightCall& what, std::string text);
  void begin(Record record, const Call& call, const engine::Stream* stream);
  std::vector<Record> end(const Call& call);
  std::vector<Record> exchange(const Record& record, const Call& call);
  void end_agree(bool wait);
  std::optional<std::int64_t> number_here(std::string_view last) const;
  std::vector<AbsentRank> absent(const Call& call, bool departed) const;
  std::string without_departed(const Call& call) const;
  std::string difference() const;
  std::string late(const Call& call) const;
  void compare(const std::vector<Record>& records, const Call& call);
  void fail(std::string message);
  std::string where(const Call& call) const;

  const std::shared_ptr<World> world_;
  const Peers peers_;
  const std::string name_;
  const std::vector<int> members_;
  const int rank_;
  Exchange& exchange_;
  FlightRing* ring_ = nullptr;  // null: nothing is recorded
  int flight_group_ = 0;
  std::int64_t sequence_ = 0;
  mutable std::mutex mutex_;      // guards said_
  std::deque<std::string> said_;  // the last calls of this rank, as it said them
  int num_splits_ = 0;
  std::uint64_t hash_;  // of all calls so far
  std::string last_ = "nothing";
  std::optional<Call> agreeing_;
};

}  // namespace tessera::comm
