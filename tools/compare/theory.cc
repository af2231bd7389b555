#include "tools/compare/theory.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/dtype.h"
#include "engine/memory.h"
#include "shard/placement.h"

namespace tessera::tools {
namespace {

using shard::Place;

// The model's parameters by unit, and into how many parts states are cut.
struct Sizes {
  explicit Sizes(const Configuration& c)
      : options(c.config.fsdp_options(c.num_ranks)),
        p(options.placement),
        ranks(c.num_ranks),
        shards(p.shard_ranks),
        all(c.model.num_parameters()),
        root(c.model.dim * (c.model.vocab + c.model.seq + 2)),
        block((all - root) / c.model.layers),
        param(engine::size_of(c.config.precision.param)),
        grad(engine::size_of(c.config.precision.reduce)) {}

  std::int64_t parts(Place place) const {
    return place == Place::kWhole ? 1 : place == Place::kShard ? shards : ranks;
  }

  shard::FsdpOptions options;
  shard::Placement p;
  std::int64_t ranks, shards;
  std::int64_t all, root, block;  // elements
  std::int64_t param, grad;       // bytes of one on the wire
};

std::string by(std::int64_t parts) { return parts > 1 ? fmt::format(" / {}", parts) : ""; }
std::string by_words(Place place) {
  return place == Place::kWhole ? "" : place == Place::kShard ? " / shard ranks" : " / ranks";
}
std::string category(engine::Category c) { return std::string(engine::name_of(c)); }

// Units ahead and the one in use.
std::int64_t num_slots(const Configuration& c, std::int64_t ahead) {
  return std::min(ahead + 1, c.model.layers);
}

bool packs(const Configuration& c) {
  return c.config.parallel.unit_min_numel > 0 || c.config.parallel.bucket_mb > 0;
}

// Terms of one sum of what is sent.
struct Sum {
  void add(const std::string& more_words, const std::string& more_numbers, double more) {
    if (more == 0) return;
    words += (words.empty() ? "" : " + ") + more_words;
    numbers += (numbers.empty() ? "" : " + ") + more_numbers;
    value += more;
  }
  // (n - 1) / n of `nbytes`, `times`.
  void ring(const std::string& what, std::int64_t times, std::int64_t n, std::int64_t width,
            std::int64_t numel) {
    if (n <= 1) return;
    const std::string factor = times > 1 ? fmt::format("{} x ", times) : "";
    add(fmt::format("{}(n-1)/n x {}", factor, what),
        fmt::format("{}{}/{} x {} B x {}", factor, n - 1, n, width, numel),
        double(times) * double(n - 1) / double(n) * double(width) * double(numel));
  }

  std::string words, numbers;
  double value = 0;
};

// The options in force are then the trainer's choice.
bool has_budget(const Configuration& c) { return c.config.memory_limit_nbytes() > 0; }

}  // namespace

std::vector<Formula> memory_formulas(const Configuration& c) {
  if (has_budget(c)) return {};
  const Sizes s(c);
  const OffloadConfig& offload = c.config.offload;
  std::vector<Formula> result;
  const auto add = [&](engine::Category kind, std::string words, std::string numbers,
                       double value) {
    result.push_back({category(kind), std::move(words), std::move(numbers), value});
  };
  const std::int64_t cut = s.parts(s.p.parameters), owned = s.parts(s.p.optimizer);
  if (offload.parameters == 0) {
    std::string words = fmt::format("{} B x parameters{}", s.param, by_words(s.p.parameters));
    std::string numbers = fmt::format("{} x {}{}", s.param, s.all, by(cut));
    double value = double(s.param) * double(s.all) / double(cut);
    if (s.param != 4) {
      words += fmt::format(" + 4 B x masters{}", by_words(s.p.optimizer));
      numbers += fmt::format(" + 4 x {}{}", s.all, by(owned));
      value += 4.0 * double(s.all) / double(owned);
    }
    add(engine::Category::kParameterShard, words, numbers, value);
  }
  const bool keeps_parts = s.p.reshard_ranks > 1 && s.p.reshard_ranks < s.shards;
  if (s.p.parameters != Place::kWhole && s.shards > 1 && !keeps_parts && !packs(c)) {
    const std::int64_t slots =
        s.p.reshard_after_forward ? num_slots(c, c.config.parallel.prefetch) : c.model.layers;
    add(engine::Category::kGatheredParameter,
        fmt::format("{} B x (root + {} x block)", s.param,
                    s.p.reshard_after_forward ? "(prefetch + 1)" : "layers"),
        fmt::format("{} x ({} + {} x {})", s.param, s.root, slots, s.block),
        double(s.param) * double(s.root + slots * s.block));
  }
  const bool reduces_each =
      c.config.train.accum_comm == AccumComm::kEvery || c.config.train.accum == 1;
  if (offload.gradients == 0 && c.config.comm.text().empty() && !packs(c) && reduces_each) {
    const std::int64_t parts = s.parts(s.p.gradients);
    const std::int64_t width = engine::size_of(c.config.precision.accumulate);
    const std::int64_t slots = num_slots(c, c.config.parallel.reductions_in_flight);
    add(engine::Category::kGradient,
        fmt::format("4 B x parameters{} + {} B x (root + (in flight + 1) x block)",
                    by_words(s.p.gradients), width),
        fmt::format("4 x {}{} + {} x ({} + {} x {})", s.all, by(parts), width, s.root, slots,
                    s.block),
        4.0 * double(s.all) / double(parts) + double(width) * double(s.root + slots * s.block));
  }
  const bool is_sgd = c.config.train.optimizer == OptimizerKind::kSgd;
  if (offload.optimizer == 0 && !(is_sgd && c.config.train.momentum == 0)) {
    const std::int64_t states = is_sgd ? 1 : 2;
    add(engine::Category::kOptimizer,
        fmt::format("{} x 4 B x parameters{}", states, by_words(s.p.optimizer)),
        fmt::format("{} x 4 x {}{}", states, s.all, by(owned)),
        4.0 * double(states) * double(s.all) / double(owned));
  }
  return result;
}

std::optional<Formula> sent_formula(const Configuration& c) {
  const Sizes s(c);
  const bool keeps_parts = s.p.reshard_ranks > 1 && s.p.reshard_ranks < s.shards;
  if (!c.config.comm.text().empty() || keeps_parts || packs(c) || has_budget(c)) {
    return std::nullopt;
  }
  const std::int64_t accum = c.config.train.accum;
  const std::int64_t reductions = c.config.train.accum_comm == AccumComm::kLast ? 1 : accum;
  Sum sum;
  if (s.p.parameters != Place::kWhole) {
    // The root is gathered once, and the last block is kept from forward to backward.
    const std::int64_t blocks = s.p.reshard_after_forward ? 2 * c.model.layers - 1 : c.model.layers;
    sum.ring("gathered parameters", accum, s.shards, s.param, s.root + blocks * s.block);
  }
  const std::int64_t held = s.parts(s.p.parameters), owned = s.parts(s.p.optimizer);
  if (owned != held) {
    sum.ring("updated parameters", 1, owned / held, s.param, s.all / held);
  }
  const std::int64_t cut = s.parts(s.p.gradients);
  if (cut == 1) {
    // Sums come back in f32, but those of NCCL's own order as they were sent.
    if (s.grad == 4 || !c.sums_in_rank_order) {
      sum.ring("gradients", 2 * reductions, s.ranks, s.grad, s.all);
    } else {
      sum.ring("gradients", reductions, s.ranks, s.grad, s.all);
      sum.ring("sums of gradients", reductions, s.ranks, 4, s.all);
    }
  } else {
    sum.ring("gradients", reductions, s.shards, s.grad, s.all);
    // Each replica hands its sum on, in f32: a broadcast for each, among the replicas.
    const std::int64_t replicas = s.ranks / s.shards;
    if (cut == s.shards) {
      sum.ring("sums handed on", reductions * replicas, replicas, 4, s.all / s.shards);
    }
  }
  if (sum.words.empty()) sum = {.words = "nothing on one rank", .numbers = "0", .value = 0};
  return Formula{"sent", sum.words, sum.numbers, sum.value};
}

}  // namespace tessera::tools
