#include "tools/probe/divergence.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

// One tensor at one moment, put together from what the ranks hold.
struct Whole {
  const ProbePart* part = nullptr;                      // of the lowest rank that has one
  std::map<std::int64_t, const ProbePart*> parts = {};  // by where they begin
  const ProbePart* other = nullptr;                     // the first whose bits differ

  // Of what begins at the same element, that of the lowest rank comes first.
  void add(const ProbePart& p, const std::string& path) {
    if (part == nullptr || p.rank < part->rank) part = &p;
    require<IoError>(
        p.shape == part->shape, "[divergence] expected one shape of {}, got {} and {} ({})",
        engine::excerpt(p.key.tensor), shape_text(part->shape), shape_text(p.shape), path);
    const auto [it, is_new] = parts.emplace(p.begin, &p);
    if (is_new) return;
    require<IoError>(it->second->checksum.numel == p.checksum.numel,
                     "[divergence] expected ranks that hold equal parts of {}, got others ({})",
                     engine::excerpt(p.key.tensor), path);
    const bool differs = it->second->checksum.hash != p.checksum.hash;
    if (differs && other == nullptr) other = &p;
  }
  bool is_complete() const {
    std::int64_t next = 0;
    for (const auto& [begin, p] : parts) {
      if (begin != next) return false;
      next += p->checksum.numel;
    }
    return next == numel_of(part->shape);
  }
  DivergentSide side() const {
    DivergentSide side{.unit = part->unit, .dtype = part->dtype, .checksum = {}};
    for (const auto& [begin, p] : parts) side.checksum += p->checksum;
    if (other != nullptr) {
      side.rank = parts.at(other->begin)->rank;
      side.other_rank = other->rank;
      side.begin = other->begin;
    }
    return side;
  }
};

using Wholes = std::map<ProbeKey, Whole>;

Wholes wholes_of(const ProbeRun& run, std::int64_t first_step, std::int64_t last_step) {
  std::vector<const ProbePart*> parts;
  for (const ProbePart& part : run.parts) {
    if (part.key.step >= first_step && part.key.step <= last_step) parts.push_back(&part);
  }
  // Ranks write in any order.
  std::ranges::sort(parts, {}, [](const ProbePart* p) { return std::tuple(p->begin, p->rank); });
  Wholes wholes;
  for (const ProbePart* part : parts) wholes[part->key].add(*part, run.path);
  return wholes;
}

// In the order of a step: micro-batches, each in the order of its pass, and what is of all.
std::vector<const Whole*> in_order(const Wholes& wholes) {
  std::vector<const Whole*> ordered;
  for (const auto& [key, whole] : wholes) ordered.push_back(&whole);
  const auto place = [](const Whole* w) {
    const ProbeKey& key = w->part->key;
    const bool is_whole_step = key.micro_batch == 0;
    return std::tuple(key.step, is_whole_step, key.micro_batch,
                      is_whole_step ? static_cast<int>(key.phase) : 0, w->part->order);
  };
  std::ranges::stable_sort(ordered,
                           [&](const Whole* a, const Whole* b) { return place(a) < place(b); });
  return ordered;
}

// Counts what is left out, by reason.
class Reasons {
 public:
  void add(const std::string& reason) {
    const auto it = std::ranges::find(all_, reason, &NotCompared::reason);
    if (it == all_.end()) {
      all_.push_back({reason, 1});
    } else {
      ++it->count;
    }
  }
  std::vector<NotCompared> take() { return std::move(all_); }

 private:
  std::vector<NotCompared> all_;
};

std::string text_of(const std::vector<NotCompared>& all) {
  std::vector<std::string> reasons;
  for (const NotCompared& item : all) reasons.push_back(engine::excerpt(item.reason));
  return reasons.empty() ? "neither has any" : engine::join(reasons, "; ");
}

// Why the two runs cannot have the same there; empty if they can.
std::string obstacle(ProbePhase phase, const ProbeHeader& a, const ProbeHeader& b) {
  using enum ProbePhase;
  const bool is_of_samples =
      phase == kOutput || phase == kOutputGradient || phase == kGradient || phase == kReduced;
  const std::int64_t batches_a = a.ranks * a.accum, batches_b = b.ranks * b.accum;
  if (is_of_samples && (a.batch != b.batch || batches_a != batches_b)) {
    return fmt::format("{}: in a step A makes {} micro-batches of {} samples, B {} of {}",
                       title_of(phase), batches_a, a.batch, batches_b, b.batch);
  }
  const bool are_alike = a.reduces_last == b.reduces_last && a.ranks == b.ranks;
  if (phase == kGradient && (a.reduces_last || b.reduces_last) && !are_alike) {
    return fmt::format(
        "{}: with train.accum_comm=last it is the sum over the micro-steps of a rank, which the "
        "other run does not have",
        title_of(phase));
  }
  return "";
}

// `may_miss`: one went wrong before it had updated all parameters.
void check_same_parameters(const Wholes& a, const Wholes& b, bool may_miss) {
  const auto shapes_of = [](const Wholes& wholes) {
    std::map<std::string, std::vector<std::int64_t>> shapes;
    for (const auto& [key, whole] : wholes) {
      if (key.phase == ProbePhase::kUpdated) shapes.emplace(key.tensor, whole.part->shape);
    }
    return shapes;
  };
  const auto in_a = shapes_of(a), in_b = shapes_of(b);
  const auto text = [](const auto& shapes, const std::string& name) {
    const auto it = shapes.find(name);
    return it == shapes.end() ? std::string("none") : shape_text(it->second);
  };
  for (const auto* shapes : {&in_a, &in_b}) {
    for (const auto& [name, shape] : *shapes) {
      if (may_miss && !(in_a.contains(name) && in_b.contains(name))) continue;
      require(text(in_a, name) == text(in_b, name),
              "[divergence] expected runs of one model, got {} of shape {} in A and {} in B",
              engine::excerpt(name), text(in_a, name), text(in_b, name));
    }
  }
}

void count_steps_apart(const ProbeRun& run, const char* name, const DivergenceReport& report,
                       Reasons& reasons) {
  std::set<ProbeKey> apart;  // a tensor of several ranks counts once
  for (const ProbePart& part : run.parts) {
    const std::int64_t step = part.key.step;
    if (step < report.first_step || step > report.last_step) apart.insert(part.key);
  }
  for (std::size_t i = 0; i < apart.size(); ++i) {
    reasons.add(fmt::format("steps that only {} has", name));
  }
}

}  // namespace

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t dim : shape) numel *= dim;
  return numel;
}

void check_same_training(const std::map<std::string, std::string>& a,
                         const std::map<std::string, std::string>& b) {
  const auto value_of = [](const std::map<std::string, std::string>& options,
                           const std::string& key) {
    const auto it = options.find(key);
    return it == options.end() ? std::string("no such option") : it->second;
  };
  for (const auto* options : {&a, &b}) {
    for (const auto& [key, value] : *options) {
      const bool counts = key.starts_with("model.") || key.starts_with("data.") ||
                          key == "train.seed" || key == "init.from";
      require(
          !counts || value_of(a, key) == value_of(b, key),
          "[divergence] expected runs of one model, data and seed, got {} in A and {} in B ({})",
          engine::excerpt(value_of(a, key)), engine::excerpt(value_of(b, key)), key);
    }
  }
}

DivergenceReport compare_probes(const ProbeRun& a, const ProbeRun& b) {
  check_same_training(a.header.options, b.header.options);
  DivergenceReport report{.first_step = std::max(a.header.first_step, b.header.first_step),
                          .last_step = std::min(a.last_step, b.last_step)};
  require(report.first_step <= report.last_step,
          "[divergence] expected runs with a step in common, got steps {} to {} in A and {} to {} "
          "in B ({}, {})",
          a.header.first_step, a.last_step, b.header.first_step, b.last_step, a.path, b.path);
  const Wholes in_a = wholes_of(a, report.first_step, report.last_step);
  const Wholes in_b = wholes_of(b, report.first_step, report.last_step);
  check_same_parameters(in_a, in_b, a.is_unfinished || b.is_unfinished);
  Reasons reasons;
  for (const Whole* whole : in_order(in_a)) {
    const ProbeKey& key = whole->part->key;
    const std::string why = obstacle(key.phase, a.header, b.header);
    const auto other = in_b.find(key);
    if (!why.empty() || other == in_b.end()) {
      reasons.add(why.empty() ? fmt::format("{}: A alone has it", title_of(key.phase)) : why);
      continue;
    }
    const Whole& match = other->second;
    if (!whole->is_complete() || !match.is_complete()) {
      reasons.add(fmt::format("{}: some ranks have not recorded their parts", title_of(key.phase)));
      continue;
    }
    ++report.num_compared;
    const DivergentSide side_a = whole->side(), side_b = match.side();
    const bool is_equal = side_a.checksum.hash == side_b.checksum.hash && whole->other == nullptr &&
                          match.other == nullptr && whole->part->shape == match.part->shape;
    if (is_equal) continue;
    ++report.num_differing;
    if (report.first) continue;
    report.num_before = report.num_compared - 1;
    report.first = Divergence{key, whole->part->shape, side_a, side_b};
  }
  for (const auto& [key, whole] : in_b) {
    if (in_a.contains(key)) continue;
    const std::string why = obstacle(key.phase, a.header, b.header);
    reasons.add(why.empty() ? fmt::format("{}: B alone has it", title_of(key.phase)) : why);
  }
  count_steps_apart(a, "A", report, reasons);
  count_steps_apart(b, "B", report, reasons);
  report.not_compared = reasons.take();
  require(report.num_compared > 0,
          "[divergence] expected runs with a tensor to compare, got none that both have: {} ({}, "
          "{})",
          text_of(report.not_compared), a.path, b.path);
  return report;
}

namespace {

std::vector<OptionDifference> differing_values(const std::map<std::string, std::string>& a,
                                               const std::map<std::string, std::string>& b) {
  std::map<std::string, OptionDifference> differences;
  for (const auto& [key, value] : a) differences[key] = {key, value, ""};
  for (const auto& [key, value] : b) {
    differences[key].key = key;
    differences[key].b = value;
  }
  std::vector<OptionDifference> result;
  for (auto& [key, difference] : differences) {
    if (difference.a != difference.b) result.push_back(std::move(difference));
  }
  return result;
}

}  // namespace

std::vector<OptionDifference> differing_options(const std::map<std::string, std::string>& a,
                                                const std::map<std::string, std::string>& b) {
  std::vector<OptionDifference> result = differing_values(a, b);
  std::erase_if(result, [](const OptionDifference& o) {
    return o.key == "out" || o.key == "audit" || o.key.starts_with("log.");
  });
  return result;
}

std::vector<OptionDifference> differing_arithmetic(const ProbeHeader& a, const ProbeHeader& b) {
  if (a.arithmetic.empty() || b.arithmetic.empty()) return {};
  return differing_values(a.arithmetic, b.arithmetic);
}

bool have_other_data(const ProbeHeader& a, const ProbeHeader& b) {
  return !a.data_digest.empty() && !b.data_digest.empty() && a.data_digest != b.data_digest;
}

}  // namespace tessera::tools
