#include "tools/planning/plan_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "engine/io/text.h"
#include "shard/split_tensor.h"

namespace tessera::tools {

using engine::Category;
using engine::size_of;
using engine::with_commas;

namespace {

constexpr std::size_t kMaxKinds = 16;  // of blocks that a category's arithmetic names

std::string slots_text(int count) { return fmt::format("{} slot{}", count, count == 1 ? "" : "s"); }

// Elements of a kind of flat, over all units.
struct Elements {
  std::int64_t whole = 0, mine = 0, on_host = 0;  // on_host: of mine
  int parts = 1;
};

class Terms {
 public:
  void add(Category category, std::string text, std::int64_t nbytes) {
    if (nbytes > 0) terms_.device[category].push_back({std::move(text), nbytes});
  }
  // `what`: what an element takes, `nbytes`, in words.
  void add(Category category, const std::string& what, std::int64_t nbytes, const Elements& e) {
    const std::string mine =
        with_commas(e.whole) + (e.parts == 1 ? "" : fmt::format(" / {}", e.parts));
    add(category,
        e.on_host == 0
            ? fmt::format("{} x {}", what, mine)
            : fmt::format("{} x ({} - {} on the host)", what, mine, with_commas(e.on_host)),
        (e.mine - e.on_host) * nbytes);
    if (e.on_host == 0) return;
    const std::string text =
        e.on_host == e.mine ? fmt::format("{} x {}", what, mine)
                            : fmt::format("{} x {}, of {}", what, with_commas(e.on_host), mine);
    terms_.host[category].push_back({text, e.on_host * nbytes});
  }
  MemoryTerms take() { return std::move(terms_); }

 private:
  MemoryTerms terms_;
};

void add_parameters(const shard::Fsdp& fsdp, Terms& terms) {
  const shard::FsdpOptions& options = fsdp.options();
  const engine::DType dtype = options.precision.param;
  Elements masters{.parts = fsdp.mesh().num_parts(options.placement.optimizer)};
  Elements wires{.parts = fsdp.mesh().num_parts(options.placement.parameters)};
  std::int64_t sent_up = 0;
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      const std::int64_t on_host = flat.master.has_host() ? flat.master.host().numel() : 0;
      wires.whole += flat.layout.flat_numel();
      wires.mine += flat.parameter_range.numel;
      if (!flat.trainable || dtype == engine::DType::kF32) {
        wires.on_host += on_host;
        continue;
      }
      masters.whole += flat.layout.flat_numel();
      masters.mine += flat.owned.numel;
      masters.on_host += on_host;
      const bool is_only_gathered = options.placement.parameters != shard::Place::kWhole &&
                                    flat.owned == flat.parameter_range;
      (is_only_gathered ? wires.on_host : sent_up) += on_host;
    }
  }
  terms.add(Category::kParameterShard, fmt::format("parameters {} B", size_of(dtype)),
            size_of(dtype), wires);
  terms.add(Category::kParameterShard, "f32 masters 4 B", 4, masters);
  terms.add(Category::kParameterShard,
            fmt::format("on their way to the device {} B", size_of(dtype)), size_of(dtype),
            {.whole = sent_up, .mine = sent_up, .on_host = sent_up});
}

void add_gathered(const shard::Fsdp& fsdp, Terms& terms) {
  const shard::FsdpOptions& options = fsdp.options();
  std::int64_t most = 0, sum = 0, root = 0;
  int num_units = 0;
  for (const auto& unit : fsdp.units()) {
    if (unit->is_root()) {
      root = unit->gathered_nbytes();
      continue;
    }
    ++num_units;
    most = std::max(most, unit->gathered_nbytes());
    sum += unit->gathered_nbytes();
  }
  const int count = std::min(options.prefetch, num_units - 1) + 1;
  if (options.placement.reshard_after_forward) {
    terms.add(Category::kGatheredParameter,
              fmt::format("{} x {} B, the largest unit (prefetch + 1)", slots_text(count),
                          with_commas(most)),
              count * most);
  } else {
    terms.add(Category::kGatheredParameter,
              fmt::format("all {} units, kept after forward", num_units), sum);
  }
  terms.add(Category::kGatheredParameter, fmt::format("the root {} B", with_commas(root)), root);
}

void add_gradients(const shard::Fsdp& fsdp, Terms& terms) {
  const shard::FsdpOptions& options = fsdp.options();
  Elements sums{.parts = fsdp.mesh().num_parts(options.placement.gradients)};
  std::int64_t most = 0, root = 0, most_sum = 0, root_sum = 0;
  int num_units = 0, num_sums = 0;
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      if (!flat.trainable) continue;
      sums.whole += flat.layout.flat_numel();
      sums.mine += flat.gradient_range.numel;
      sums.on_host +=
          shard::SplitTensor::host_numel(flat.gradient_range.numel, options.offload.gradients);
    }
    std::int64_t& nbytes = unit->is_root() ? root : most;
    std::int64_t& sum_nbytes = unit->is_root() ? root_sum : most_sum;
    nbytes = std::max(nbytes, unit->gradient_nbytes());
    sum_nbytes = std::max(sum_nbytes, unit->sum_nbytes());
    num_units += unit->is_root() ? 0 : 1;
    num_sums += unit->sum_nbytes() > 0 ? 1 : 0;
  }
  const int count = std::min(options.reductions_in_flight, num_units - 1) + 1;
  terms.add(Category::kGradient,
            fmt::format("{} x {} B, the largest unit (reductions in flight + 1)", slots_text(count),
                        with_commas(most)),
            count * most);
  terms.add(Category::kGradient, fmt::format("the root {} B", with_commas(root)), root);
  terms.add(Category::kGradient, "sums 4 B", 4, sums);
  if (options.offload.gradients == 0) return;
  const int num_slots = std::min(options.reductions_in_flight + 1, num_sums);
  const std::int64_t first = std::max(most_sum, root_sum);
  terms.add(Category::kGradient,
            fmt::format("slot {} B, the largest sum on its way to the host", with_commas(first)),
            num_slots > 0 ? first : 0);
  terms.add(Category::kGradient,
            fmt::format("{} x {} B, other sums on their way", slots_text(num_slots - 1),
                        with_commas(most_sum)),
            (num_slots - 1) * most_sum);
}

void add_states(const shard::Fsdp& fsdp, int num_states, Terms& terms) {
  const shard::FsdpOptions& options = fsdp.options();
  Elements states{.parts = fsdp.mesh().num_parts(options.placement.optimizer)};
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      if (!flat.trainable) continue;
      states.whole += flat.layout.flat_numel();
      states.mine += flat.owned.numel;
      states.on_host += shard::SplitTensor::host_numel(flat.owned.numel, options.offload.optimizer);
    }
  }
  terms.add(Category::kOptimizer, fmt::format("{} states x 4 B", num_states), num_states * 4,
            states);
}

// Blocks of units that differ in the unit's name alone are of one kind. The largest first.
std::vector<PeakBlocks::Kind> joined(std::vector<PeakBlocks::Kind> kinds, const shard::Fsdp& fsdp) {
  const auto without_unit = [&](const std::string& what) {
    const std::size_t name = what.rfind(", ") + 2;
    for (const auto& unit : fsdp.units()) {
      const std::string prefix = unit->name() + ".";
      if (what.compare(name, prefix.size(), prefix) == 0) {
        return fmt::format("{}{} of a unit", what.substr(0, name),
                           what.substr(name + prefix.size()));
      }
    }
    return what;
  };
  std::vector<PeakBlocks::Kind> result;
  std::map<std::string, std::size_t> at;
  for (PeakBlocks::Kind& kind : kinds) {
    kind.what = without_unit(kind.what);
    const auto [it, is_new] = at.try_emplace(kind.what, result.size());
    if (is_new) {
      result.push_back(std::move(kind));
    } else {
      result[it->second].count += kind.count;
    }
  }
  std::ranges::stable_sort(result, [](const PeakBlocks::Kind& a, const PeakBlocks::Kind& b) {
    return a.count * a.nbytes > b.count * b.nbytes;
  });
  return result;
}

// Small blocks of many kinds are one term.
std::vector<PlanTerm> terms_of(const std::vector<PeakBlocks::Kind>& kinds) {
  std::vector<PlanTerm> terms;
  const std::span<const PeakBlocks::Kind> all = kinds;
  const std::size_t num_named = std::min(all.size(), kMaxKinds);
  for (const PeakBlocks::Kind& kind : all.first(num_named)) {
    terms.push_back({fmt::format("{} x {}", kind.count, kind.what), kind.count * kind.nbytes});
  }
  std::int64_t count = 0, nbytes = 0;
  for (const PeakBlocks::Kind& kind : all.subspan(num_named)) {
    count += kind.count;
    nbytes += kind.count * kind.nbytes;
  }
  if (nbytes > 0)
    terms.push_back({fmt::format("{} smaller block{}", count, count == 1 ? "" : "s"), nbytes});
  return terms;
}

}  // namespace

MemoryTerms memory_terms(const shard::Fsdp& fsdp, int num_states) {
  Terms terms;
  add_parameters(fsdp, terms);
  add_gathered(fsdp, terms);
  add_gradients(fsdp, terms);
  add_states(fsdp, num_states, terms);
  return terms.take();
}

std::vector<PlannedMemory> planned_memory(const engine::MemoryStats& memory,
                                          const TermsByCategory& terms, const PeakBlocks& blocks,
                                          const shard::Fsdp& fsdp) {
  std::vector<PlannedMemory> result;
  for (int i = 0; i < engine::kNumCategories; ++i) {
    const auto category = static_cast<Category>(i);
    PlannedMemory planned{category, memory.peak_nbytes[static_cast<std::size_t>(i)], {}};
    std::int64_t rest = planned.nbytes;
    if (const auto it = terms.find(category); it != terms.end()) planned.terms = it->second;
    for (const PlanTerm& term : planned.terms) rest -= term.nbytes;
    if (rest != 0) planned.terms = terms_of(joined(blocks.most(category), fsdp));
    result.push_back(std::move(planned));
  }
  return result;
}

}  // namespace tessera::tools
