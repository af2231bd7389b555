#include "comm/messages/collectives.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/staging.h"
#include "comm/threads/kernels.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::DType;

// What is summed at a time. Of two pieces one comes while the other is summed, from the caches
// where it has just been written.
constexpr std::int64_t kPieceNbytes = 512 << 10;
constexpr std::int64_t kNumPieces = 8;  // in the staging memory

class Share {
 public:
  Share(const Collective& c, const Tensor& staging, int rank, int size, Messages& messages)
      : c_(c), staging_(staging), rank_(rank), size_(size), messages_(messages) {}

  void all_gather() {
    const std::int64_t part = c_.in.nbytes();
    meet_and_post(part, [&] {
      for (int r = 0; r < size_; ++r) messages_.receive(r, c_.out.raw() + r * part, part);
      for (int r = 0; r < size_; ++r) messages_.send(r, c_.in.raw(), part);
    });
    keep(c_.in.raw(), c_.out.raw() + rank_ * part, part);
    messages_.wait();
  }

  void all_to_all() {
    const std::int64_t part = c_.in.nbytes() / size_;
    meet_and_post(part, [&] {
      for (int r = 0; r < size_; ++r) messages_.receive(r, c_.out.raw() + r * part, part);
      for (int r = 0; r < size_; ++r) messages_.send(r, c_.in.raw() + r * part, part);
    });
    keep(c_.in.raw() + rank_ * part, c_.out.raw() + rank_ * part, part);
    messages_.wait();
  }

  // The root gives each of the others a part, and these give each other theirs: nobody sends the
  // whole more than once.
  void broadcast() {
    if (size_ == 1) {
      messages_.meet();
      return;
    }
    const std::int64_t nbytes = c_.in.nbytes();
    const std::int64_t part = round_up_part((nbytes + size_ - 2) / (size_ - 1));
    struct Part {
      int rank;
      std::byte* bytes;
      std::int64_t nbytes;
    };
    std::vector<Part> parts;
    for (int r = 0; r < size_; ++r) {
      if (r == c_.root) continue;
      const std::int64_t begin = std::min(nbytes, std::ssize(parts) * part);
      parts.push_back({r, c_.out.raw() + begin, std::min(part, nbytes - begin)});
    }
    const auto mine = std::ranges::find(parts, rank_, &Part::rank);
    meet_and_post(part, [&] {
      if (mine != parts.end()) messages_.receive(c_.root, mine->bytes, mine->nbytes);
      for (const Part& p : parts) {
        if (mine == parts.end()) messages_.send(p.rank, p.bytes, p.nbytes);
      }
    });
    messages_.wait();
    if (mine == parts.end()) return;
    for (const Part& p : parts) messages_.receive(p.rank, p.bytes, p.nbytes);
    for (const Part& p : parts) messages_.send(p.rank, mine->bytes, mine->nbytes);
    messages_.wait();
  }

  void reduce_scatter() { sum_blocks(c_.out.numel(), out()); }

  // A reduce-scatter with parts that may differ by some elements, and then everybody's sums to
  // everybody.
  void all_reduce() {
    const std::int64_t part = all_reduce_part(c_.out.numel(), size_);
    const Block own = block(rank_, part);
    float* const sums = out() + own.begin;
    sum_blocks(part, sums);
    constexpr std::int64_t kSumSize = sizeof(float);
    for (int r = 0; r < size_; ++r) {
      const Block his = block(r, part);
      messages_.receive(r, out() + his.begin, his.numel * kSumSize);
    }
    for (int r = 0; r < size_; ++r) messages_.send(r, sums, own.numel * kSumSize);
    messages_.wait();
  }

 private:
  float* out() const { return c_.out.data<float>(); }

  // Elements of `in`: those of rank `r`, if each has `part` while there are any.
  struct Block {
    std::int64_t begin, numel;
  };
  Block block(int r, std::int64_t part) const {
    const std::int64_t begin = std::min(c_.in.numel(), r * part);
    return {begin, std::min(part, c_.in.numel() - begin)};
  }

  // Meets the others, and posts the first messages, of at most `nbytes` each.
  template <class F>
  void meet_and_post(std::int64_t nbytes, const F& post) {
    const bool is_short = nbytes <= Messages::kShortNbytes;
    if (!is_short) messages_.meet();
    post();
    if (is_short) messages_.meet();
  }

  // The rank's own block, unless it lies in place.
  static void keep(const std::byte* from, std::byte* to, std::int64_t nbytes) {
    if (from != to) copy(to, from, nbytes, store_for(nbytes));
  }

  // Meets the others. Then everybody's blocks of this rank become `sums`, in rank order and piece
  // by piece.
  void sum_blocks(std::int64_t part, float* sums) {
    const std::int64_t in_size = size_of(c_.in.dtype());
    const std::int64_t piece = std::min(part, kPieceNbytes / in_size);
    const std::int64_t num_pieces = (part + piece - 1) / piece;
    const std::int64_t stride =
        std::min(round_up_part(part * in_size), kNumPieces * piece * in_size);
    const auto piece_of = [&](int r, std::int64_t i) {
      const Block all = block(r, part);
      return Block{all.begin + i * piece,
                   std::clamp<std::int64_t>(all.numel - i * piece, 0, piece)};
    };
    const auto staged = [&](int r, std::int64_t i) {
      return staging_.raw() + r * stride + i % kNumPieces * piece * in_size;
    };
    std::array<std::vector<std::size_t>, kNumPieces> incoming;
    const auto post = [&](std::int64_t i) {
      const std::int64_t nbytes = piece_of(rank_, i).numel * in_size;
      auto& messages = incoming[static_cast<std::size_t>(i % kNumPieces)];
      messages.clear();
      for (int r = 0; r < size_; ++r) {
        messages.push_back(messages_.receive(r, staged(r, i), nbytes));
      }
      for (int r = 0; r < size_; ++r) {
        const Block his = piece_of(r, i);
        messages_.send(r, c_.in.raw() + his.begin * in_size, his.numel * in_size);
      }
    };
    meet_and_post(part * in_size, [&] {
      for (std::int64_t i = 0; i < std::min(num_pieces, kNumPieces); ++i) post(i);
    });
    const auto store = store_for(block(rank_, part).numel * std::int64_t{sizeof(float)});
    for (std::int64_t i = 0; i < num_pieces; ++i) {
      for (const std::size_t message : incoming[static_cast<std::size_t>(i % kNumPieces)]) {
        messages_.wait(message);
      }
      const Block own = piece_of(rank_, i);
      std::vector<const void*> ins;
      for (int r = 0; r < size_; ++r) {
        ins.push_back(r == rank_ ? c_.in.raw() + own.begin * in_size : staged(r, i));
      }
      float* const to = sums + i * piece;
      sum_in_rank_order(c_.in.dtype(), ins, c_.accumulate == Accumulate::kYes ? to : nullptr,
                        {&to, 1}, own.numel, store);
      if (i + kNumPieces < num_pieces) post(i + kNumPieces);
    }
    messages_.wait();
  }

  const Collective& c_;
  const Tensor& staging_;
  const int rank_, size_;
  Messages& messages_;
};

}  // namespace

void check_on_host(const Collective& c, const Stream& stream, int rank) {
  if (!stream.device().is_cuda()) return;
  engine::fail(
      "[{}] expected memory of the host, which messages between processes move, got '{}' of {} "
      "(rank {})",
      c.work.name, stream.name(), to_string(stream.device()), rank);
}

void carry_out(const Collective& c, const Tensor& staging, int rank, int size, Messages& messages) {
  if (c.in.numel() == 0) {
    messages.meet();
    return;
  }
  Share share(c, staging, rank, size, messages);
  switch (c.op) {
    case Collective::Op::kAllGather:
      return share.all_gather();
    case Collective::Op::kReduceScatter:
      return share.reduce_scatter();
    case Collective::Op::kAllReduce:
      return share.all_reduce();
    case Collective::Op::kBroadcast:
      return share.broadcast();
    case Collective::Op::kAllToAll:
      return share.all_to_all();
  }
}

}  // namespace tessera::comm
