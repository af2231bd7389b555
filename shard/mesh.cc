#include "shard/mesh.h"

#include <utility>

#include "engine/error.h"

namespace tessera::shard {

using comm::ProcessGroup;
using engine::require;

Mesh::Mesh(ProcessGroup& world, int shard_ranks, int reshard_ranks, bool gathers)
    : world_(world), shard_ranks_(shard_ranks) {
  const int size = world.size();
  require(shard_ranks >= 1 && size % shard_ranks == 0,
          "[mesh] expected shard_ranks that divide {} ranks, got {}", size, shard_ranks);
  require(reshard_ranks >= 0 && (reshard_ranks == 0 || shard_ranks % reshard_ranks == 0),
          "[mesh] expected reshard_after_forward to divide {} shard_ranks, got {}", shard_ranks,
          reshard_ranks);
  if (size == 1) return;
  const bool is_grid = 1 < shard_ranks && shard_ranks < size;
  gather_.world = &world;
  reduce_.world = gathers ? keep(world.split_by([](int) { return 0; })) : &world;
  for (Axes* axes : {&gather_, &reduce_}) {
    if (is_grid) {
      axes->shard = keep(world.split_by([=](int r) { return r / shard_ranks; }));
      axes->replicate = keep(world.split_by([=](int r) { return r % shard_ranks; }));
    } else {
      (shard_ranks == size ? axes->shard : axes->replicate) = axes->world;
    }
  }
  if (reshard_ranks > 1 && reshard_ranks < shard_ranks) {
    reshard_ = keep(world.split_by([=](int r) { return r / reshard_ranks; }));
  }
}

ProcessGroup* Mesh::keep(std::unique_ptr<ProcessGroup> group) {
  groups_.push_back(std::move(group));
  return groups_.back().get();
}

ProcessGroup* Mesh::group_of(Place place) const {
  return place == Place::kShard ? gather_.shard : place == Place::kWorld ? gather_.world : nullptr;
}

// Parts of a shard lie side by side in its column, so over a grid they become a shard first.
std::vector<ProcessGroup*> Mesh::gathers_of(Place place) const {
  const bool is_grid = gather_.shard != nullptr && gather_.replicate != nullptr;
  if (place == Place::kWorld && is_grid) return {gather_.replicate, gather_.shard};
  ProcessGroup* group = group_of(place);
  return group == nullptr ? std::vector<ProcessGroup*>() : std::vector{group};
}

int Mesh::num_parts(Place place) const {
  return place == Place::kShard ? shard_ranks_ : place == Place::kWorld ? world_.size() : 1;
}

int Mesh::part(Place place) const {
  switch (place) {
    case Place::kWhole:
      return 0;
    case Place::kShard:
      return shard_index();
    case Place::kWorld:
      return shard_index() * num_replicas() + replica();
  }
  return 0;
}

int Mesh::owner(Place place, int part) const {
  if (place != Place::kWorld) return part;
  return part % num_replicas() * shard_ranks_ + part / num_replicas();
}

void Mesh::agree(const engine::Stream& stream) const {
  world_.agree(stream);
  for (const auto& group : groups_) group->agree(stream);
}

void gather_parts(const std::vector<ProcessGroup*>& groups, const engine::Tensor& all, Range part,
                  const engine::Stream& stream, const std::string& label) {
  for (ProcessGroup* group : groups) {
    const std::int64_t numel = part.numel * group->size();
    const Range next{part.begin / numel * numel, numel};
    group->all_gather(all.slice(part.begin, {part.numel}), all.slice(next.begin, {next.numel}),
                      stream, label);
    part = next;
  }
}

}  // namespace tessera::shard
