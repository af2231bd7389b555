#include "shard/summon.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "comm/host_gather.h"
#include "engine/copy.h"
#include "engine/error.h"
#include "engine/philox.h"
#include "shard/cut_values.h"

namespace tessera::shard {

using engine::Parameter;
using engine::require;
using engine::Tensor;

namespace {

// Each rank keeps its part of its own edits, so they must be one edit.
void check_edits(Fsdp& fsdp, const std::vector<const Parameter*>& parameters,
                 const std::vector<std::vector<float>>& values) {
  std::vector<std::int64_t> hashes;
  for (const std::vector<float>& all : values) {
    const std::string_view bytes{reinterpret_cast<const char*>(all.data()),
                                 all.size() * sizeof(float)};
    hashes.push_back(static_cast<std::int64_t>(engine::fnv1a(bytes)));
  }
  const auto of_ranks = comm::gather_to_host<std::int64_t>(fsdp.mesh().world(), hashes,
                                                           fsdp.memory(), fsdp.compute(), "summon");
  for (std::size_t i = 0; i < of_ranks.size(); ++i) {
    const std::size_t parameter = i % hashes.size();
    require(of_ranks[i] == of_ranks[parameter],
            "[summon] expected the same edits on all ranks, got others on rank {} than on rank 0 "
            "({})",
            i / hashes.size(), parameters[parameter]->name);
  }
}

}  // namespace

void summon(Fsdp& fsdp, const std::vector<const Parameter*>& parameters,
            const std::function<void(const std::vector<Tensor>&)>& fn, SummonOptions options) {
  const int num_ranks = fsdp.mesh().world().size(), only = options.only_rank;
  require(only >= -1 && only < num_ranks, "[summon] expected a rank below {}, got {}", num_ranks,
          only);
  CutValues cut(fsdp);
  cut.check_at_rest("summon");
  fsdp.mesh().world().declare("summon");
  const bool is_given = only < 0 || only == fsdp.mesh().world().rank();
  std::vector<Tensor> whole;
  for (const Parameter* p : parameters) {
    const Location at = fsdp.location_of(*p);
    const Tensor all = cut.whole(at, at.flat.master);
    if (is_given) whole.push_back(all);
  }
  fsdp.compute().synchronize();
  if (fsdp.compute().device().is_cuda()) fsdp.mesh().world().check();
  if (is_given) {
    const auto held = options.write_back ? cut.hold("summon()") : std::shared_ptr<const void>();
    const auto paused = only < 0 ? nullptr : fsdp.mesh().world().pause_deadline();
    fn(whole);
    fsdp.compute().synchronize();  // what it launched there
  }
  if (!options.write_back) return;
  std::vector<std::vector<float>> values(parameters.size());
  for (std::size_t i = 0; i < whole.size(); ++i) values[i] = engine::to_vector<float>(whole[i]);
  whole.clear();
  if (only < 0) check_edits(fsdp, parameters, values);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (only < 0) {
      fsdp.load(*parameters[i], values[i]);
    } else {
      fsdp.load_from(only, *parameters[i], values[i]);
    }
  }
  fsdp.parameters_changed();
}

}  // namespace tessera::shard
