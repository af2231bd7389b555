// A group of N ranks that move tensors. Nothing here knows about parameters or gradients.
//
// Collectives are enqueued on a stream and return at once; the caller keeps the tensors resident
// and untouched until an event recorded after them is reached. All ranks call the same collectives
// of a group in the same order; each call carries a fingerprint (sequence number, op, dtypes,
// count, label), and ranks that disagree get a CommError that names both sides, on every rank.
// Counts are elements. Reductions are sums in rank order, in f32: see [Note: rank order] in
// threads/kernels.cc, and sums_in_rank_order().
//
// [Note: failures on a GPU stream] Waiting on a CPU stream rethrows what failed on it. A GPU
// that waits for its peers can only be released: its stream then ends without an error and without
// the data. So after waiting for a CUDA stream call check() before believing what was received.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/error.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::comm {

using engine::CommError;
using engine::Stream;
using engine::Tensor;

/// Where a reduction starts: from rank 0's contribution, or from the running sum in `out`.
enum class Accumulate { kNo, kYes };

/// A call of one of the collectives below, checked.
struct Collective {
  enum class Op { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kAllToAll };

  Op op;
  Tensor in, out;  ///< of a broadcast one tensor
  Accumulate accumulate = Accumulate::kNo;
  int root = 0;
  engine::Work work;      ///< one rank's share
  std::string text = {};  ///< everything that must agree: op, reduction, dtypes, count, root, label
};

/// What one rank has called and sent, by the algorithms that send least: each rank's part of what
/// others need once, in the dtype that it has on the wire; an all-reduce is a reduce-scatter and an
/// all-gather, and of a broadcast each rank passes on (N - 1) / N. A backend may send more. Ranks
/// over NCCL count what they hand to its calls; its own all-reduce of bf16 sends bf16 in both
/// halves.
struct Traffic {
  std::int64_t num_collectives = 0;
  std::int64_t bytes_sent = 0;

  friend bool operator==(const Traffic&, const Traffic&) = default;
};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Whether reductions keep the contract of [Note: rank order] to the bit. If not, the backend
  /// states how far its sums may lie from it.
  virtual bool sums_in_rank_order() const = 0;

  // Collectives: `label` names the unit or purpose in errors and traces. The tensors lie on the
  // device of the stream. They throw InvalidArgument on bad arguments (no other overlap than named
  // here) before anything is sent; CommError comes from waiting on the stream, from check(), and on
  // a CUDA stream also from the call itself.

  /// in [n] on every rank -> out [n * size()], rank r's block at r * n. Any dtype, in == out dtype.
  /// `in` may be the rank's own block of `out`.
  void all_gather(const Tensor& in, const Tensor& out, const Stream& stream,
                  std::string_view label);
  /// in [n * size()] f32|bf16 -> out [n] f32: block rank() of in_0 + in_1 + ... in rank order, each
  /// sum rounded to f32; with kYes added one by one onto what `out` holds.
  /// With kNo and f32 `out` may be the rank's own block of `in`.
  void reduce_scatter(const Tensor& in, const Tensor& out, Accumulate accumulate,
                      const Stream& stream, std::string_view label);
  /// in [n] f32|bf16 -> out [n] f32, the same sum, whole, on every rank. With kNo and f32
  /// `out` may be `in`; with kYes `out` must hold the same running sum on every rank.
  void all_reduce(const Tensor& in, const Tensor& out, Accumulate accumulate, const Stream& stream,
                  std::string_view label);
  /// inout [n] on `root` -> the same on every rank. Any dtype.
  void broadcast(const Tensor& inout, int root, const Stream& stream, std::string_view label);
  /// in [n * size()] -> out [n * size()]: block s of rank r becomes block r of rank s. Any dtype.
  void all_to_all(const Tensor& in, const Tensor& out, const Stream& stream,
                  std::string_view label);

  /// Once a step, on every rank: compares what the ranks have called so far. A difference is told
  /// by check() or a host call once the stream has come here. For backends that compare each call
  /// as it is made this does nothing. `stream` has waited for the step's other collectives, as
  /// over NCCL this is one, too.
  virtual void agree(const Stream& stream) = 0;

  // Host calls.

  /// Says what this rank does now, in words, and waits for nobody. All ranks say the same in the
  /// same place among their calls: a difference is told as that of collectives is.
  virtual void declare(std::string_view what) = 0;

  /// Blocks until every rank is here. Throws CommError naming who is missing after the deadline.
  virtual void barrier(std::string_view label) = 0;
  /// Ranks of equal `color` form a new group, ordered by `key`, ties by rank. Collective.
  std::unique_ptr<ProcessGroup> split(int color, int key);
  /// split() in the order of ranks, with a color that every rank can tell of all ranks: for groups
  /// without peers to ask (meta.h) as well.
  std::unique_ptr<ProcessGroup> split_by(const std::function<int(int rank)>& color);
  /// Of this group, and of those that were split from it, since it was made.
  Traffic traffic() const;
  /// While the result lives, no time counts against the deadline of ranks that wait for each other:
  /// for work that this rank cannot bound, such as writing to a slow disk. Over NCCL ranks of other
  /// processes wait on as ever.
  [[nodiscard]] virtual std::shared_ptr<const void> pause_deadline() = 0;
  /// Throws the CommError that this group failed with, if it did.
  virtual void check() = 0;
  /// Wakes every rank of the world, in all its groups, with a CommError that carries `reason`. The
  /// first reason wins; the groups are unusable afterwards. Idempotent.
  virtual void abort(std::string_view reason) noexcept = 0;

 protected:
  ProcessGroup() = default;
  /// The number that rank `rank` of this group has in the world, for messages.
  virtual int world_rank(int rank) const = 0;

 private:
  struct Counts {
    std::atomic<std::int64_t> num_collectives = 0, bytes_sent = 0;
  };

  /// What split() returns.
  virtual std::unique_ptr<ProcessGroup> make_part(int color, int key) = 0;
  virtual std::unique_ptr<ProcessGroup> make_part_by(const std::function<int(int rank)>& color);
  /// Bytes that this rank sends for `c`, if the backend carries it out otherwise than Traffic
  /// assumes.
  virtual std::optional<std::int64_t> own_bytes_sent(const Collective& /*c*/) const {
    return std::nullopt;
  }
  /// Carries out `collective` as work of `stream`. Returns how many bytes this rank sends, for
  /// traffic(): a backend that hands them to a library counts what it hands over.
  virtual std::int64_t enqueue(Collective collective, const Stream& stream) = 0;
  /// Enqueues it with its text, of which `more` is what one op alone has to say.
  void submit(Collective collective, std::int64_t numel, std::string_view more,
              const Stream& stream);

  std::shared_ptr<Counts> traffic_ = std::make_shared<Counts>();
};

}  // namespace tessera::comm
