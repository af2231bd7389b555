#include "comm/messages/collectives.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/staging.h"
#include "comm/threads/kernels.h"

namespace tessera::comm {
namespace {

using engine::DType;

class Share {
 public:
  Share(const Collective& c, const Tensor& staging, int rank, int size,
        MessageRank::Messages& messages)
      : c_(c), staging_(staging), rank_(rank), size_(size), messages_(messages) {}

  void all_gather() {
    const std::int64_t part = c_.in.nbytes();
    for (int r = 0; r < size_; ++r) messages_.receive(r, c_.out.raw() + r * part, part);
    for (int r = 0; r < size_; ++r) messages_.send(r, c_.in.raw(), part);
    keep(c_.in.raw(), c_.out.raw() + rank_ * part, part);
    messages_.wait();
  }

  void all_to_all() {
    const std::int64_t part = c_.in.nbytes() / size_;
    for (int r = 0; r < size_; ++r) messages_.receive(r, c_.out.raw() + r * part, part);
    for (int r = 0; r < size_; ++r) messages_.send(r, c_.in.raw() + r * part, part);
    keep(c_.in.raw() + rank_ * part, c_.out.raw() + rank_ * part, part);
    messages_.wait();
  }

  // The root gives each of the others a part, and these give each other theirs: nobody sends the
  // whole more than once.
  void broadcast() {
    if (size_ == 1) return;
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
    if (mine == parts.end()) {
      for (const Part& p : parts) messages_.send(p.rank, p.bytes, p.nbytes);
    } else {
      messages_.receive(c_.root, mine->bytes, mine->nbytes);
      messages_.wait();
      for (const Part& p : parts) messages_.receive(p.rank, p.bytes, p.nbytes);
      for (const Part& p : parts) messages_.send(p.rank, mine->bytes, mine->nbytes);
    }
    messages_.wait();
  }

  // All blocks come here and are folded from where they lie.
  void reduce_scatter() {
    const std::int64_t part = c_.in.nbytes() / size_;
    const std::int64_t stride = round_up_part(part);
    for (int r = 0; r < size_; ++r) messages_.receive(r, staging_.raw() + r * stride, part);
    for (int r = 0; r < size_; ++r) messages_.send(r, c_.in.raw() + r * part, part);
    messages_.wait();
    fold(c_.in.raw() + rank_ * part, stride, out(), c_.out.numel());
  }

  // A reduce-scatter with parts that may differ by some elements, and then everybody's sums to
  // everybody.
  void all_reduce() {
    const std::int64_t all = c_.out.numel();
    const std::int64_t part = all_reduce_part(all, size_);
    const auto begin = [&](int r) { return std::min(all, r * part); };
    const auto numel = [&](int r) { return begin(r + 1) - begin(r); };
    const std::int64_t in_size = size_of(c_.in.dtype());
    constexpr std::int64_t kSumSize = sizeof(float);
    const std::int64_t mine = numel(rank_);
    const std::int64_t stride = part * in_size;

    for (int r = 0; r < size_; ++r) {
      messages_.receive(r, staging_.raw() + r * stride, mine * in_size);
    }
    for (int r = 0; r < size_; ++r) {
      messages_.send(r, c_.in.raw() + begin(r) * in_size, numel(r) * in_size);
    }
    messages_.wait();
    float* const sums = out() + begin(rank_);
    fold(c_.in.raw() + begin(rank_) * in_size, stride, sums, mine);
    for (int r = 0; r < size_; ++r) messages_.receive(r, out() + begin(r), numel(r) * kSumSize);
    for (int r = 0; r < size_; ++r) messages_.send(r, sums, mine * kSumSize);
    messages_.wait();
  }

 private:
  float* out() const { return c_.out.data<float>(); }

  // The rank's own block, unless it lies in place.
  static void keep(const std::byte* from, std::byte* to, std::int64_t nbytes) {
    if (from != to) copy(to, from, nbytes, store_for(nbytes));
  }

  // In rank order: `own`, and of the others what was staged, `stride` bytes apart.
  void fold(const std::byte* own, std::int64_t stride, float* sums, std::int64_t numel) {
    std::vector<const void*> ins;
    for (int r = 0; r < size_; ++r) ins.push_back(r == rank_ ? own : staging_.raw() + r * stride);
    const float* const start = c_.accumulate == Accumulate::kYes ? sums : nullptr;
    sum_in_rank_order(c_.in.dtype(), ins, start, {&sums, 1}, numel,
                      store_for(numel * std::int64_t{sizeof(float)}));
  }

  const Collective& c_;
  const Tensor& staging_;
  const int rank_, size_;
  MessageRank::Messages& messages_;
};

}  // namespace

void carry_out(const Collective& c, const Tensor& staging, int rank, int size,
               MessageRank::Messages& messages) {
  if (c.in.numel() == 0) return;
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
