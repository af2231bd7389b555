#include "tools/compare/comparison/classes.h"

#include <algorithm>
#include <set>

#include "engine/io/text.h"

namespace tessera::tools {
namespace {

// Options of the schedule and of placement, and those that only say what is checked, printed or
// saved.
bool keeps_bits(const std::string& key) {
  static const std::set<std::string> keys = {
      "parallel.launcher",
      "parallel.transport",
      "parallel.address",
      "parallel.interface",
      "parallel.insecure",
      "parallel.strategy",
      "parallel.shard_ranks",
      "parallel.prefetch",
      "parallel.backward_prefetch",
      "parallel.reductions_in_flight",
      "parallel.reshard_after_forward",
      "parallel.unit_min_numel",
      "parallel.bucket_mb",
      "parallel.deadline_s",
      "cpu.pin",
      "offload.parameters",
      "offload.gradients",
      "offload.optimizer",
      "offload.threads",
      "train.recompute",
      "train.overlap_optimizer",
      "train.check_gradients",
      "train.max_minutes",
      "train.max_skips",
      "train.spike_factor",
      "train.verify_every",
      "powersgd.offload_error",
      "save.final",
      "save.shard_gib",
      "out",
      "plan",
      "audit",
      "memory_budget",
      "memory_check",
  };
  return keys.contains(key) || key.starts_with("log.") || key.starts_with("rates.") ||
         key.starts_with("sample.");
}

bool makes_another_training(const std::string& key) {
  return key.starts_with("model.") || key.starts_with("data.") || key.starts_with("init.") ||
         key.starts_with("lora.") ||
         (key.starts_with("train.") && key != "train.accum_comm" && key != "train.accum");
}

// A square of all elements of a unit depends on which blocks the unit has.
bool changes_units(const std::string& key) {
  return key == "parallel.unit_min_numel" || key == "parallel.bucket_mb" ||
         key == "parallel.strategy";
}

bool deals_micro_batches(const std::string& key) {
  return key == "parallel.ranks" || key == "parallel.threads" || key == "train.accum";
}

bool same_samples(const Configuration& a, const Configuration& b) {
  return a.num_ranks * a.config.train.accum == b.num_ranks * b.config.train.accum;
}

bool same_micro_batches(const Configuration& a, const Configuration& b) {
  const bool reduces_each = a.config.train.accum_comm == AccumComm::kEvery &&
                            b.config.train.accum_comm == AccumComm::kEvery;
  return same_samples(a, b) && reduces_each && a.options.at("comm.hook") == "\"none\"";
}

// A budget that all else does not meet makes micro-batches smaller, and more of them.
bool budgets_cut_batches_apart(const Configuration& a, const Configuration& b) {
  return a.config.train.batch == b.config.train.batch &&
         a.fitted.train.batch != b.fitted.train.batch;
}

std::string value_text(const Configuration& c, const std::string& key) {
  if (key == "train.batch") return std::to_string(c.fitted.train.batch);
  if (key == "train.accum") return std::to_string(c.fitted.train.accum);
  const std::string& literal = c.options.at(key);
  return literal.starts_with('"') && literal.size() > 2 ? literal.substr(1, literal.size() - 2)
                                                        : literal;
}

// The values of `keys`, in their order.
std::string label_of(const Configuration& c, const std::vector<std::string>& keys) {
  std::vector<std::string> words;
  for (const std::string& key : keys) words.push_back(key + "=" + value_text(c, key));
  return engine::join(words, " ");
}

}  // namespace

OptionEffect effect_of(const std::string& key) {
  if (keeps_bits(key)) return OptionEffect::kNone;
  return makes_another_training(key) ? OptionEffect::kTraining : OptionEffect::kArithmetic;
}

std::vector<std::string> arithmetic_differences(const Configuration& a, const Configuration& b) {
  std::vector<std::string> reasons;
  const bool same_batches = same_micro_batches(a, b);
  const bool in_order = a.sums_in_rank_order && b.sums_in_rank_order;
  const bool is_square = b.options.at("comm.hook").find("batched") != std::string::npos;
  for (const auto& [key, value] : b.options) {
    const auto other = a.options.find(key);
    if (other != a.options.end() && other->second == value) continue;
    const bool is_nccl_order = !in_order && key.starts_with("parallel.");
    const bool is_exact =
        (deals_micro_batches(key) && same_batches) || effect_of(key) == OptionEffect::kNone;
    if (!is_exact || is_nccl_order || (is_square && changes_units(key))) {
      reasons.push_back(key);
    }
  }
  if (budgets_cut_batches_apart(a, b)) reasons.emplace_back("memory_budget");
  return reasons;
}

std::vector<std::string> training_differences(const Configuration& a, const Configuration& b) {
  std::vector<std::string> reasons = arithmetic_differences(a, b);
  std::erase_if(reasons, [&](const std::string& key) {
    const bool deals_others = deals_micro_batches(key) && !same_samples(a, b);
    return effect_of(key) != OptionEffect::kTraining && !deals_others;
  });
  return reasons;
}

std::vector<ArithmeticClass> classes_of(const std::vector<Configuration>& configurations) {
  std::vector<ArithmeticClass> classes;
  const auto first_of = [&](const ArithmeticClass& c) -> const Configuration& {
    return configurations[c.members.front()];
  };
  std::set<std::string> keys;  // that set any class apart
  for (std::size_t i = 0; i < configurations.size(); ++i) {
    const Configuration& mine = configurations[i];
    const auto own = std::ranges::find_if(classes, [&](const ArithmeticClass& c) {
      return arithmetic_differences(first_of(c), mine).empty();
    });
    if (own != classes.end()) {
      own->members.push_back(i);
      continue;
    }
    const auto alike = std::ranges::find_if(classes, [&](const ArithmeticClass& c) {
      return training_differences(first_of(c), mine).empty();
    });
    ArithmeticClass added{.members = {i},
                          .measured_against = static_cast<std::size_t>(alike - classes.begin())};
    if (!classes.empty()) {
      const bool is_measured = alike != classes.end();
      added.changes = is_measured ? arithmetic_differences(first_of(*alike), mine)
                                  : training_differences(configurations.front(), mine);
      const std::vector<std::string> all = arithmetic_differences(configurations.front(), mine);
      keys.insert(all.begin(), all.end());
    }
    classes.push_back(std::move(added));
  }
  if (keys.erase("memory_budget") > 0) keys.insert({"train.batch", "train.accum"});  // that it made
  const std::vector<std::string> sorted(keys.begin(), keys.end());
  for (ArithmeticClass& c : classes) c.label = label_of(first_of(c), sorted);
  return classes;
}

}  // namespace tessera::tools
