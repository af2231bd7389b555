#include <fmt/format.h>

#include <algorithm>

#include "comm/meta.h"
#include "shard/optimizer/update_parts.h"
#include "shard/split_tensor.h"
#include "tools/planning/planner.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

std::string rank_kind(const TrainConfig& config, const PlanTarget& target, Model& model) {
  const auto is_part = [](double fraction) { return fraction > 0 && fraction < 1; };
  const OffloadConfig& offload = config.offload;
  // Groups of some ranks may be in one process where those of others are not.
  const shard::Placement placement = config.parallel.placement(target.num_ranks);
  for (const int group : {placement.shard_ranks, placement.reshard_ranks}) {
    const int each = target.ranks_per_process();
    if (group > 1 && group % each != 0 && each % group != 0) {
      return fmt::format("rank {}", target.rank);
    }
  }
  const bool has_parts =
      is_part(offload.parameters) || is_part(offload.gradients) || is_part(offload.optimizer);
  const bool compresses_shards = config.comm.powersgd.across_replicas;
  if (!has_parts && !compresses_shards && !target.on_gpus) return "";
  const auto world = comm::make_meta_rank(target.rank, target.num_ranks,
                                          {.sums_in_rank_order = target.sums_in_rank_order,
                                           .stages = target.stages,
                                           .ranks_per_process = target.ranks_per_process()});
  const auto compute = engine::Stream::meta(
      "compute", target.on_gpus ? engine::DeviceKind::kCuda : engine::DeviceKind::kCpu,
      target.rates);
  Trainer trainer(*world, compute, config, model.blocks(), model.root(), /*log=*/nullptr);
  std::string kind;
  for (const auto& unit : trainer.fsdp().units()) {
    for (const shard::Flat& flat : unit->flats()) {
      kind += fmt::format("{} {}:", flat.owned.numel, flat.master.split());
      if (!flat.trainable) continue;
      if (compresses_shards) {  // each piece of a parameter as a matrix of its own
        for (const shard::Segment& s : flat.layout.segments(flat.gradient_range)) {
          kind += fmt::format("{}+{}*{},", s.parameter, s.parameter_begin, s.numel);
        }
      }
      // Of what is owned, whose sum may be a part of a longer one.
      const shard::Range& sums = flat.gradient_range;
      const std::int64_t sum_split = sums.numel -
                                     shard::SplitTensor::host_numel(sums.numel, offload.gradients) -
                                     (flat.owned.begin - sums.begin);
      kind += fmt::format("{}:", std::clamp(sum_split, std::int64_t{0}, flat.owned.numel));
      for (const shard::UpdatePart& part : shard::parts_of(flat, trainer.fsdp(), unit->name())) {
        // On a GPU a kernel's table of tiles is as long as there are pieces of parameters.
        kind += fmt::format("{}{}{},", part.range.numel, part.is_on_host ? " host" : "",
                            part.tiles.defined() ? fmt::format(" {}", part.tiles.numel()) : "");
      }
    }
  }
  return kind;
}

}  // namespace tessera::tools
