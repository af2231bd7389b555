#include "tests/tools/compare/comparison/strategy_formulas.h"

#include <algorithm>
#include <memory>

#include "engine/dtype.h"
#include "shard/placement.h"
#include "tools/models/language_model.h"

namespace tessera::testing {
namespace {

using shard::Place;
using tools::Configuration;

std::int64_t numel_of(const engine::Block& block) {
  std::int64_t numel = 0;
  for (const engine::Parameter* p : block.parameters) numel += p->shape.numel();
  return numel;
}

// The model's parameters by unit, and into how many parts states are cut.
struct Sizes {
  explicit Sizes(const Configuration& c)
      : options(c.config.fsdp_options(c.num_ranks)),
        p(options.placement),
        ranks(c.num_ranks),
        shards(options.placement.shard_ranks),
        param(engine::size_of(c.config.precision.param)),
        grad(engine::size_of(c.config.precision.reduce)) {
    const std::unique_ptr<tools::LanguageModel> model = c.model.make();
    root = numel_of(*model->root());
    block = numel_of(*model->blocks().front());
    all = root + c.model.layers * block;
  }

  std::int64_t parts(Place place) const {
    return place == Place::kWhole ? 1 : place == Place::kShard ? shards : ranks;
  }
  bool keeps_parts() const { return p.reshard_ranks > 1 && p.reshard_ranks < shards; }

  shard::FsdpOptions options;
  shard::Placement p;
  std::int64_t ranks, shards;
  std::int64_t all = 0, root = 0, block = 0;  // elements
  std::int64_t param, grad;                   // bytes of one on the wire
};

// Units ahead and the one in use.
std::int64_t num_slots(const Configuration& c, std::int64_t ahead) {
  return std::min(ahead + 1, c.model.layers);
}

bool packs(const Configuration& c) {
  return c.config.parallel.unit_min_numel > 0 || c.config.parallel.bucket_mb > 0;
}

// The options in force are then the trainer's choice.
bool has_budget(const Configuration& c) { return c.config.memory_limit_nbytes() > 0; }

// (n - 1) / n of `nbytes`.
double ring(std::int64_t n, std::int64_t nbytes) {
  return double(n - 1) / double(n) * double(nbytes);
}

}  // namespace

std::map<engine::Category, double> memory_formulas(const Configuration& c) {
  std::map<engine::Category, double> result;
  if (has_budget(c)) return result;
  const Sizes s(c);
  const tools::OffloadConfig& offload = c.config.offload;
  const auto part_of = [&](std::int64_t nbytes, Place place) {
    return double(nbytes) * double(s.all) / double(s.parts(place));
  };
  if (offload.parameters == 0) {
    result[engine::Category::kParameterShard] =
        part_of(s.param, s.p.parameters) + (s.param == 4 ? 0 : part_of(4, s.p.optimizer));
  }
  if (s.p.parameters != Place::kWhole && s.shards > 1 && !s.keeps_parts() && !packs(c)) {
    const std::int64_t slots =
        s.p.reshard_after_forward ? num_slots(c, c.config.parallel.prefetch) : c.model.layers;
    result[engine::Category::kGatheredParameter] = double(s.param * (s.root + slots * s.block));
  }
  const bool reduces_each =
      c.config.train.accum_comm == tools::AccumComm::kEvery || c.config.train.accum == 1;
  if (offload.gradients == 0 && c.config.comm.text().empty() && !packs(c) && reduces_each) {
    const std::int64_t width = engine::size_of(c.config.precision.accumulate);
    const std::int64_t slots = num_slots(c, c.config.parallel.reductions_in_flight);
    result[engine::Category::kGradient] =
        part_of(4, s.p.gradients) + double(width * (s.root + slots * s.block));
  }
  const bool is_sgd = c.config.train.optimizer == tools::OptimizerKind::kSgd;
  if (offload.optimizer == 0 && !(is_sgd && c.config.train.momentum == 0)) {
    result[engine::Category::kOptimizer] = part_of(is_sgd ? 4 : 8, s.p.optimizer);
  }
  return result;
}

std::optional<double> sent_formula(const Configuration& c) {
  const Sizes s(c);
  if (!c.config.comm.text().empty() || s.keeps_parts() || packs(c) || has_budget(c)) {
    return std::nullopt;
  }
  const std::int64_t accum = c.config.train.accum;
  const std::int64_t reductions = c.config.train.accum_comm == tools::AccumComm::kLast ? 1 : accum;
  double sent = 0;
  if (s.p.parameters != Place::kWhole) {
    // The root is gathered once, and the last block is kept from forward to backward.
    const std::int64_t blocks = s.p.reshard_after_forward ? 2 * c.model.layers - 1 : c.model.layers;
    sent += double(accum) * ring(s.shards, s.param * (s.root + blocks * s.block));
  }
  const std::int64_t held = s.parts(s.p.parameters), owned = s.parts(s.p.optimizer);
  if (owned != held) sent += ring(owned / held, s.param * (s.all / held));
  const std::int64_t cut = s.parts(s.p.gradients);
  if (cut == 1) {
    // Sums come back in f32, but those of NCCL's own order as they were sent.
    const std::int64_t back = c.sums_in_rank_order ? 4 : s.grad;
    return sent + double(reductions) * ring(s.ranks, (s.grad + back) * s.all);
  }
  sent += double(reductions) * ring(s.shards, s.grad * s.all);
  // Each replica hands its sum on, in f32: a broadcast for each, among the replicas.
  const std::int64_t replicas = s.ranks / s.shards;
  if (cut == s.shards) sent += double(reductions * replicas) * ring(replicas, 4 * s.all / s.shards);
  return sent;
}

}  // namespace tessera::testing
