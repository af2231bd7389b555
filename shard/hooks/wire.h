// Sums over ranks of f32 values that travel in fewer bits: each is rounded once, by the rank that
// sends it, and sums are f32 in the order of ranks.
//
// [Note: sums of f16]
// No collective adds f16, so words are exchanged (all_to_all) and added where they arrive: each
// rank adds one block of the elements of all ranks, and the sums are gathered, in f32, by those who
// keep them. That is 2 bytes an element to reduce to shards, as of bf16, and 4 more to have the
// whole.
#pragma once

#include <string>
#include <string_view>

#include "comm/process_group.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/hooks/hook_kernels.h"
#include "shard/hooks/scratch.h"
#include "shard/mesh.h"

namespace tessera::shard {

/// What a value is rounded to before it is sent. f16 is infinite from 65520 on.
enum class Wire { kF32, kBF16, kF16 };
std::string_view name_of(Wire wire);
/// Bytes of one value.
std::int64_t size_of(Wire wire);

/// Sums f16 over all ranks, for those that keep the same shard of the result.
class HalfSum {
 public:
  /// Tensors have up to `num_shards` shards of up to `shard_numel` elements; `axes`: of the stream
  /// that sums. With one shard all ranks keep it, otherwise rank r keeps shard r % num_shards.
  HalfSum(const Axes& axes, int num_shards, std::int64_t shard_numel, Scratch& scratch);

  /// in (num_shards * n) f32 or bf16 -> out (n) f32: this rank's shard of the sum; with
  /// `accumulate` added rank by rank onto what `out` holds, which is the same on all that keep it.
  void add(const engine::Tensor& in, const engine::Tensor& out, bool accumulate,
           const engine::Stream& stream, const std::string& label) const;

 private:
  comm::ProcessGroup* world_;
  comm::ProcessGroup* keepers_;  // null: this rank alone
  int num_shards_;
  Scratch& scratch_;
};

/// Sums messages of hooks over all ranks.
class WireSum {
 public:
  /// Of up to `numel` elements.
  WireSum(Wire wire, const Axes& axes, std::int64_t numel, Scratch& scratch);

  /// inout (n) f32 = the sum over ranks, on every rank. Of one rank alone what was rounded.
  void all_reduce(const engine::Tensor& inout, const engine::Stream& stream,
                  const std::string& label) const;

 private:
  Wire wire_;
  comm::ProcessGroup* world_;
  HalfSum half_;
  Scratch& scratch_;
};

}  // namespace tessera::shard
