// Where ranks that share memory meet: they compare what they call, do the work together, and leave
// when all of it is done. Knows nothing of tensors.
//
// [Note: one meeting] A collective is one meeting, found by its sequence number. Each rank brings a
// slot (its pointers) and sleeps; the last to come makes it ready. From then on the work (chunks of
// a block per rank) can be done by whoever runs: a rank takes the chunks of its own block, then
// helps with the others', and the last chunk lets everyone go. So a small collective is done by the
// last to come while the rest sleep (one wake-up each), and a big one keeps every core busy however
// few there are. Nobody waits for a particular rank once a meeting is ready: it always completes,
// even if the world fails meanwhile, so no rank can take its memory away from under another.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/world/call.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// What a rank brings to a meeting; the op says what it points to.
struct Slot {
  const void* in = nullptr;
  void* out = nullptr;
};

/// The work of a meeting: `num_per_block` chunks for each rank's block, done in any order by any
/// rank, each once. If one throws, the others still run; then the world fails with the error and
/// the rank whose block it was, and whoever ran it gets the error itself.
struct Chunks {
  std::int64_t num_per_block = 0;
  bool wake = true;  ///< false: too little work to wake sleepers for, the last to come does it
  /// false: each rank does its own block, and waits for the others' at most the deadline. Then no
  /// chunk is begun any more, and one that a rank is in is waited for a little longer.
  bool shared = true;
  std::function<void(std::span<const Slot> slots, int block, std::int64_t chunk)> run = {};
};

/// The meetings of one group.
class Rendezvous final : private World::Group {
 public:
  /// Of a group that has ranks elsewhere, too.
  struct Part {
    std::string text;              ///< which, for messages: "of process 1"
    std::vector<int> all_members;  ///< those of the whole group; empty: there are no others
  };

  /// The op of an announced call that nothing waits for.
  static constexpr std::string_view kDeclare = "declare";

  /// `members`: the group's ranks as ranks of the world. `name` is for messages. `part`: these are
  /// a part of it.
  Rendezvous(std::shared_ptr<World> world, std::string name, std::vector<int> members,
             const Part& part = {});
  ~Rendezvous() override;
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  const std::string& name() const { return name_; }
  const std::shared_ptr<World>& world() const { return world_; }
  /// A call of rank `rank`, recorded if its world is.
  FlightTicket record(int rank, std::int64_t sequence, const FlightCall& call) const;

  /// Returns when every rank has come and all chunks are done. Throws CommError otherwise.
  void meet(int rank, const Call& call, const Slot& slot, const Chunks& chunks);
  /// Compares `call` with what the others called, without waiting for them. Throws CommError if
  /// they differ, or have left.
  void announce(int rank, const Call& call);
  /// Fails the world because `call`, which was announced, did not end in time: names who is
  /// missing.
  void expire(const Call& call);
  /// `rank` will come to no meeting from number `sequence` on; whoever waits there for it fails.
  void depart(int rank, std::int64_t sequence) noexcept;

 private:
  struct Meeting;
  using Key = std::pair<std::int64_t, int>;  // the sequence number of a call, and its round

  void meet_and_work(int rank, const Call& call, const Slot& slot, const Chunks& chunks);
  std::shared_ptr<Meeting> arrive(int rank, const Call& call, const Slot& slot,
                                  const Chunks& chunks);
  void await(Meeting& meeting);
  void give_up(const Call& call, Meeting& meeting, std::int64_t num_per_block);
  void fail_late(const Call& call, const Meeting* meeting);  // under the world's mutex
  void fail_chunk(const Call& call, int block) noexcept;
  std::string where(const Call& call) const;
  std::string absent(const Meeting& meeting, bool only_departed) const;
  void fail_if_departed(const Meeting& meeting) noexcept;
  void world_failed() override;
  std::string wait_of(int world_rank) const override;

  const std::shared_ptr<World> world_;
  const std::string name_, ranks_text_;  // ranks_text_: as "expected 2 ranks" has them
  const std::vector<int> members_;
  int flight_group_ = 0;
  std::vector<FlightRing*> flight_rings_;             // by rank; none if nothing is recorded
  std::map<Key, std::shared_ptr<Meeting>> meetings_;  // not ready yet
  std::vector<std::int64_t> departed_;                // by rank: no meetings from here on
  std::vector<std::string> last_;                     // by rank: the last call it came to
};

}  // namespace tessera::comm
