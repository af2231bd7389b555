#include "shard/initialise.h"

#include "engine/error.h"
#include "shard/cut_values.h"

namespace tessera::shard {

using engine::Parameter;
using engine::Tensor;

void initialise(Fsdp& fsdp, const std::function<void(const Parameter&, std::span<float>)>& fn,
                int only_rank) {
  comm::ProcessGroup& world = fsdp.mesh().world();
  engine::require(only_rank >= -1 && only_rank < world.size(),
                  "[initialise] expected a rank below {}, got {}", world.size(), only_rank);
  CutValues(fsdp).check_at_rest("initialise");
  const engine::Memory host =
      fsdp.memory().device().is_cuda() ? engine::Memory({.cache = false}) : fsdp.memory();
  for (const auto& unit : fsdp.units()) {
    for (const Flat& flat : unit->flats()) {
      for (const Parameter* p : flat.parameters) {
        Tensor all;
        std::span<float> values;
        if (only_rank < 0 || only_rank == world.rank()) {
          all = Tensor::empty(host, p->shape, engine::DType::kF32, p->name,
                              engine::Category::kWorkspace);
          values = all.span<float>();
          const auto paused = only_rank < 0 ? nullptr : world.pause_deadline();
          fn(*p, values);
        }
        if (only_rank < 0) {
          fsdp.load(*p, values);
        } else {
          fsdp.load_from(only_rank, *p, values);
        }
      }
    }
  }
  fsdp.parameters_changed();
}

}  // namespace tessera::shard
