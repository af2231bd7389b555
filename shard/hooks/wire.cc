#include "shard/hooks/wire.h"

#include <algorithm>

#include "engine/elementwise.h"
#include "engine/error.h"

namespace tessera::shard {

using comm::Accumulate;
using engine::DType;
using engine::Stream;
using engine::Tensor;

namespace {

std::int64_t divided_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

int size_of_group(const comm::ProcessGroup* group) { return group == nullptr ? 1 : group->size(); }

}  // namespace

std::string_view name_of(Wire wire) {
  switch (wire) {
    case Wire::kF32:
      return "f32";
    case Wire::kBF16:
      return "bf16";
    case Wire::kF16:
      return "f16";
  }
  return "?";
}

std::int64_t size_of(Wire wire) { return wire == Wire::kF32 ? 4 : 2; }

HalfSum::HalfSum(const Axes& axes, int num_shards, std::int64_t shard_numel, Scratch& scratch)
    : world_(axes.world),
      keepers_(num_shards == 1 ? axes.world : axes.replicate),
      num_shards_(num_shards),
      scratch_(scratch) {
  const std::int64_t num_ranks = size_of_group(world_), num_keepers = size_of_group(keepers_);
  const std::int64_t block = divided_up(shard_numel, num_keepers);
  scratch.reserve("half.sent", 2 * num_ranks * block, DType::kU8);
  scratch.reserve("half.received", 2 * num_ranks * block, DType::kU8);
  scratch.reserve("half.sums", num_keepers * block, DType::kF32);
}

void HalfSum::add(const Tensor& in, const Tensor& out, bool accumulate, const Stream& stream,
                  const std::string& label) const {
  const std::int64_t num_ranks = size_of_group(world_), num_keepers = size_of_group(keepers_);
  const std::int64_t block = divided_up(out.numel(), num_keepers);
  const Tensor sent = scratch_.get("half.sent", {2 * num_ranks * block});
  launch_pack_half(stream, sent, in,
                   {.num_ranks = num_ranks,
                    .num_shards = num_shards_,
                    .shard_numel = out.numel(),
                    .block_numel = block},
                   label);
  Tensor received = sent;
  if (world_ != nullptr) {
    received = scratch_.get("half.received", sent.shape());
    world_->all_to_all(sent, received, stream, label);
  }
  if (keepers_ == nullptr) {
    return launch_add_halves(stream, out, received, num_ranks, block, accumulate, label);
  }
  // In place where the blocks are just the shard.
  const bool fits = num_keepers * block == out.numel();
  const Tensor sums = fits ? out : scratch_.get("half.sums", {num_keepers * block});
  const std::int64_t begin = std::min(keepers_->rank() * block, out.numel());
  const std::int64_t numel = std::min(block, out.numel() - begin);
  const Tensor mine = sums.slice(keepers_->rank() * block, {block});
  const Tensor values = mine.slice(0, {numel});
  if (!fits && accumulate && numel > 0) {
    engine::launch_assign_or_add(stream, values, out.slice(begin, {numel}), false, "hook.running",
                                 label);
  }
  if (numel > 0) {
    launch_add_halves(stream, values, received, num_ranks, block, accumulate, label);
  }
  keepers_->all_gather(mine, sums, stream, label);
  if (!fits) {
    engine::launch_assign_or_add(stream, out, sums.slice(0, out.shape()), false, "hook.sums",
                                 label);
  }
}

WireSum::WireSum(Wire wire, const Axes& axes, std::int64_t numel, Scratch& scratch)
    : wire_(wire),
      world_(axes.world),
      half_(axes, 1, wire == Wire::kF16 ? numel : 0, scratch),
      scratch_(scratch) {
  if (wire == Wire::kBF16) scratch.reserve("wire", numel, DType::kBF16);
}

void WireSum::all_reduce(const Tensor& inout, const Stream& stream,
                         const std::string& label) const {
  if (inout.numel() == 0) return;
  if (wire_ == Wire::kF16) return half_.add(inout, inout, false, stream, label);
  Tensor sent = inout;
  if (wire_ == Wire::kBF16) {
    sent = scratch_.get("wire", inout.shape());
    engine::launch_assign_or_add(stream, sent, inout, false, "cast", label);
  }
  if (world_ != nullptr) {
    world_->all_reduce(sent, inout, Accumulate::kNo, stream, label);
  } else if (wire_ == Wire::kBF16) {
    engine::launch_assign_or_add(stream, inout, sent, false, "cast", label);
  }
}

}  // namespace tessera::shard
