#include "comm/hybrid/chain.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "comm/staging.h"
#include "comm/threads/kernels.h"

namespace tessera::comm {
namespace {

constexpr std::int64_t kSumSize = sizeof(float);

class Chain {
 public:
  explicit Chain(const HybridCall& call)
      : call_(call),
        c_(call.collective()),
        messages_(call.messages),
        me_(call.between.rank()),
        last_(call.between.size() - 1),
        scatters_(c_.op == Collective::Op::kReduceScatter),
        adds_(c_.accumulate == Accumulate::kYes),
        all_(c_.in.numel()),
        piece_(std::min(kChainNumel, all_)),
        num_pieces_((all_ + piece_ - 1) / piece_) {
    for (const auto& share : call.shares) {
      for (std::int64_t i = 0; (i + 1) * piece_ <= share->staging.nbytes() / kSumSize; ++i) {
        rooms_.push_back({.sums = reinterpret_cast<float*>(share->staging.raw()) + i * piece_});
      }
    }
    for (int p = 0; p <= last_; ++p) {
      process_of_.insert(process_of_.end(), call.between.ranks(p).size(), p);
    }
  }

  void run() {
    if (adds_ && scatters_ && me_ != 0) send_starts();
    // Half of the rooms are on their way to the next process.
    const auto ahead = static_cast<std::int64_t>(rooms_.size() / 2);
    for (std::int64_t i = 0; i < std::min(ahead, num_pieces_); ++i) begin(i);
    for (std::int64_t i = 0; i < num_pieces_; ++i) {
      if (i + ahead < num_pieces_) begin(i + ahead);
      add(i);
      pass_on(i);
      if (me_ != last_) take_back(i);
    }
    if (!scatters_ && me_ != last_) pass_around();
    messages_.wait();
  }

 private:
  // For a piece on its way through this process.
  struct Room {
    float* sums;
    std::vector<std::size_t> incoming = {}, outgoing = {};
  };
  Room& room(std::int64_t i) { return rooms_[static_cast<std::size_t>(i) % rooms_.size()]; }
  std::int64_t begin_of(std::int64_t i) const { return i * piece_; }
  std::int64_t numel(std::int64_t i) const { return std::min(piece_, all_ - begin_of(i)); }
  // Of an all-reduce: piece `i` where the first rank here has it.
  float* whole(std::int64_t i) const {
    return reinterpret_cast<float*>(call_.shares.front()->out) + begin_of(i);
  }
  int owner_of_part(std::int64_t i) const { return static_cast<int>(i % last_); }

  // fn(rank, where in its block, where in the piece, numel) for the owners of piece `i`.
  template <class F>
  void for_owners(std::int64_t i, F fn) const {
    const std::int64_t block = c_.out.numel(), begin = begin_of(i), end = begin + numel(i);
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t rank = at / block, next = std::min(end, (rank + 1) * block);
      fn(rank, at - rank * block, at - begin, next - at);
      at = next;
    }
  }
  int process_of(std::int64_t rank) const { return process_of_[static_cast<std::size_t>(rank)]; }
  float* block(std::int64_t rank) const { return reinterpret_cast<float*>(call_.of(rank).out); }
  static void copy_sums(float* to, const float* from, std::int64_t numel) {
    std::memcpy(to, from, static_cast<std::size_t>(numel * kSumSize));
  }

  // What sums begin with, of the owners here.
  void send_starts() {
    for (std::int64_t i = 0; i < num_pieces_; ++i) {
      for_owners(i, [&](std::int64_t rank, std::int64_t in_block, std::int64_t, std::int64_t n) {
        if (!call_.is_here(rank)) return;
        starts_.push_back(
            messages_.send(0, block(rank) + in_block, n * kSumSize, Messages::kAhead));
      });
    }
  }

  // Waits until there is room for piece `i`, and receives what comes before this process's own.
  void begin(std::int64_t i) {
    Room& room = this->room(i);
    for (const std::size_t sent : room.outgoing) messages_.wait(sent);
    room.outgoing.clear();
    room.incoming.clear();
    if (me_ != 0) {
      room.incoming = {messages_.receive(me_ - 1, room.sums, numel(i) * kSumSize)};
    } else if (adds_ && scatters_) {
      for_owners(i, [&](std::int64_t rank, std::int64_t, std::int64_t at, std::int64_t n) {
        if (call_.is_here(rank)) return;
        room.incoming.push_back(
            messages_.receive(process_of(rank), room.sums + at, n * kSumSize, Messages::kAhead));
      });
    }
  }

  // The sum before this process adds to it; null: nothing has been added yet.
  const float* sums_so_far(std::int64_t i) {
    float* const sums = room(i).sums;
    if (me_ != 0) return sums;
    if (!adds_) return nullptr;
    if (!scatters_) return whole(i);
    for_owners(i, [&](std::int64_t rank, std::int64_t in_block, std::int64_t at, std::int64_t n) {
      if (call_.is_here(rank)) copy_sums(sums + at, block(rank) + in_block, n);
    });
    return sums;
  }

  void add(std::int64_t i) {
    Room& room = this->room(i);
    for (const std::size_t received : room.incoming) messages_.wait(received);
    std::vector<const void*> ins;
    for (const auto& share : call_.shares) {
      ins.push_back(share->in + begin_of(i) * size_of(c_.in.dtype()));
    }
    sum_in_rank_order(c_.in.dtype(), ins, sums_so_far(i), {&room.sums, 1}, numel(i),
                      Store::kCached);
  }

  void pass_on(std::int64_t i) {
    Room& room = this->room(i);
    if (me_ != last_) {
      room.outgoing = {messages_.send(me_ + 1, room.sums, numel(i) * kSumSize)};
    } else if (scatters_) {
      for_owners(i, [&](std::int64_t rank, std::int64_t in_block, std::int64_t at, std::int64_t n) {
        if (call_.is_here(rank)) {
          copy_sums(block(rank) + in_block, room.sums + at, n);
        } else {
          room.outgoing.push_back(messages_.send(process_of(rank), room.sums + at, n * kSumSize));
        }
      });
    } else {
      copy_sums(whole(i), room.sums, numel(i));
      room.outgoing = {messages_.send(owner_of_part(i), room.sums, numel(i) * kSumSize)};
    }
  }

  // What the last process sends here. That may overwrite what the ranks here brought to piece `i`,
  // which has been added.
  void take_back(std::int64_t i) {
    if (!scatters_) {
      if (owner_of_part(i) == me_) {
        parts_.push_back({i, messages_.receive(last_, whole(i), numel(i) * kSumSize)});
      }
      return;
    }
    for_owners(i, [&](std::int64_t rank, std::int64_t in_block, std::int64_t, std::int64_t n) {
      if (!call_.is_here(rank)) return;
      if (!starts_.empty()) messages_.wait(starts_[num_taken_++]);
      messages_.receive(last_, block(rank) + in_block, n * kSumSize);
    });
  }

  // Of an all-reduce: the parts that this process has of the last one, and those that others have.
  void pass_around() {
    for (std::int64_t i = 0; i < num_pieces_; ++i) {
      if (owner_of_part(i) == me_) continue;
      messages_.receive(owner_of_part(i), whole(i), numel(i) * kSumSize);
    }
    for (const Part& part : parts_) {
      messages_.wait(part.received);
      for (int p = 0; p < last_; ++p) {
        if (p != me_) messages_.send(p, whole(part.piece), numel(part.piece) * kSumSize);
      }
    }
  }

  struct Part {
    std::int64_t piece;
    std::size_t received;
  };

  const HybridCall& call_;
  const Collective& c_;
  Messages& messages_;
  const int me_, last_;  // processes
  const bool scatters_, adds_;
  const std::int64_t all_, piece_, num_pieces_;
  std::vector<Room> rooms_;
  std::vector<int> process_of_;      // by rank of the group
  std::vector<std::size_t> starts_;  // in the order in which they are taken back as sums
  std::size_t num_taken_ = 0;
  std::vector<Part> parts_;
};

}  // namespace

void reduce_in_chain(const HybridCall& call) { Chain(call).run(); }

}  // namespace tessera::comm
