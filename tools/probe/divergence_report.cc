#include "tools/probe/divergence_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using json = nlohmann::ordered_json;

std::int64_t rank_of(std::int64_t micro_batch, const ProbeHeader& header) {
  return (micro_batch - 1) % header.ranks;
}
std::int64_t micro_step_of(std::int64_t micro_batch, const ProbeHeader& header) {
  return (micro_batch - 1) / header.ranks + 1;
}

std::string plural(std::int64_t n, const char* one) {
  return fmt::format("{} {}{}", engine::with_commas(n), one, n == 1 ? "" : "s");
}

std::string run_text(const char* letter, const DivergenceRun& run) {
  std::string text =
      fmt::format("{}: {} ({} x {})", letter, engine::escaped(run.name),
                  plural(run.header.ranks, "rank"), plural(run.header.accum, "micro-step"));
  if (!run.failure.empty())
    text += fmt::format("; it ended early: {}", engine::escaped(run.failure));
  return text;
}

std::string place_text(const ProbeKey& key, const DivergenceResult& r) {
  if (key.micro_batch == 0) return fmt::format("step {}", key.step);
  const auto who = [&](const ProbeHeader& header) {
    return fmt::format("rank {}, micro-step {}", rank_of(key.micro_batch, header),
                       micro_step_of(key.micro_batch, header));
  };
  return fmt::format("step {}, micro-batch {} (A: {}; B: {})", key.step, key.micro_batch,
                     who(r.a.header), who(r.b.header));
}

// "37 = (1, 5)"
std::string index_text(std::int64_t index, const std::vector<std::int64_t>& shape) {
  if (shape.size() < 2) return std::to_string(index);
  std::vector<std::int64_t> at(shape.size());
  std::int64_t rest = index;
  for (std::size_t i = shape.size(); i-- > 0;) {
    at[i] = rest % shape[i];
    rest /= shape[i];
  }
  return fmt::format("{} = ({})", index, fmt::join(at, ", "));
}

std::string side_text(const char* letter, const DivergentSide& side) {
  std::string text = fmt::format("  {}: {}, unit {}, largest {:.9g}, sum {:.9g}, checksum {:016x}",
                                 letter, side.dtype, engine::escaped(side.unit),
                                 side.checksum.max_abs, side.checksum.sum, side.checksum.hash);
  if (side.rank >= 0) {
    text += fmt::format("; rank {} has other bits than rank {} in the part from element {} on",
                        side.other_rank, side.rank, side.begin);
  }
  return text;
}

std::string values_text(const ValueDifference& d, const Divergence& first) {
  if (d.num_differing == 0) return "  no element differs in the second runs";
  const bool is_nan = std::isnan(d.max_abs);
  return fmt::format(
      "  {} of {} differ{}, the first at {}: A {:.9g}, B {:.9g}; largest difference {}{}",
      engine::with_commas(d.num_differing), plural(numel_of(first.shape), "element"),
      d.num_differing == 1 ? "s" : "", index_text(d.first_index, first.shape), d.a, d.b,
      is_nan ? std::string("not a number") : fmt::format("{:.9g}", d.max_abs),
      is_nan && d.max_ulps == 0 ? "" : fmt::format(", at most {}", plural(d.max_ulps, "ULP")));
}

// A JSON literal, without the quotes of a text; `none` where there is none.
std::string value_text(const std::string& literal, const char* none) {
  if (literal.empty()) return none;
  const bool is_text = literal.size() > 2 && literal.front() == '"' && literal.back() == '"';
  return engine::excerpt(is_text ? literal.substr(1, literal.size() - 2) : literal);
}

// "train.lr (A 0.1, B 0.2); x (A 1, B no such option)"
std::string differences_text(const std::vector<OptionDifference>& options, const char* none) {
  constexpr std::size_t kMost = 6;
  std::vector<std::string> texts;
  for (const OptionDifference& option : options) {
    if (texts.size() == kMost) {
      texts.push_back(fmt::format("{} more in divergence.json", options.size() - kMost));
      break;
    }
    texts.push_back(fmt::format("{} (A {}, B {})", engine::escaped(option.key),
                                value_text(option.a, none), value_text(option.b, none)));
  }
  return engine::join(texts, "; ");
}

// What decided bits: data and arithmetic ahead of options, which may all be the same.
std::vector<std::string> causes(const ProbeHeader& a, const ProbeHeader& b) {
  std::vector<std::string> lines;
  if (have_other_data(a, b)) {
    lines.push_back(fmt::format("The data differ, although their path is the same: A has {}, B {}",
                                engine::excerpt(a.data_digest), engine::excerpt(b.data_digest)));
  }
  if (const auto arithmetic = differing_arithmetic(a, b); !arithmetic.empty()) {
    lines.push_back("The arithmetic differs: " + differences_text(arithmetic, "none"));
  }
  const std::vector<OptionDifference> options = differing_options(a.options, b.options);
  lines.push_back(options.empty()
                      ? "All options of the training are the same."
                      : "Options that differ: " + differences_text(options, "no such option"));
  const auto add_untold = [&](const char* what, bool is_a_told, bool is_b_told) {
    if (is_a_told && is_b_told) return;
    lines.push_back(fmt::format("{} which {} it was made with, which may differ.",
                                is_a_told   ? "The record of B does not say"
                                : is_b_told ? "The record of A does not say"
                                            : "Neither record says",
                                what));
  };
  add_untold("data", !a.data_digest.empty(), !b.data_digest.empty());
  add_untold("arithmetic", !a.arithmetic.empty(), !b.arithmetic.empty());
  return lines;
}

json to_json(const std::vector<OptionDifference>& differences) {
  json result = json::array();
  const auto value = [](const std::string& literal) {
    return literal.empty() ? json() : json(literal);
  };
  for (const OptionDifference& o : differences) {
    result.push_back({{"option", o.key}, {"a", value(o.a)}, {"b", value(o.b)}});
  }
  return result;
}

// JSON has no numbers for these.
json number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  return value;
}

json to_json(const DivergentSide& side) {
  json result = {{"unit", side.unit},
                 {"dtype", side.dtype},
                 {"checksum", fmt::format("{:016x}", side.checksum.hash)},
                 {"max_abs", number(side.checksum.max_abs)},
                 {"sum", number(side.checksum.sum)}};
  if (side.rank >= 0) {
    result["ranks_that_differ"] = {side.rank, side.other_rank};
    result["from_element"] = side.begin;
  }
  return result;
}

json to_json(const DivergenceRun& run) {
  return {{"name", run.name},
          {"record", run.path},
          {"ranks", run.header.ranks},
          {"accum", run.header.accum},
          {"data_digest", run.header.data_digest.empty() ? json() : json(run.header.data_digest)},
          {"failure", run.failure.empty() ? json() : json(run.failure)}};
}

json first_json(const DivergenceResult& r) {
  if (!r.report.first) return {};
  const Divergence& first = *r.report.first;
  const ProbeKey& key = first.key;
  json result = {{"step", key.step},
                 {"micro_batch", key.micro_batch == 0 ? json() : json(key.micro_batch)},
                 {"phase", name_of(key.phase)},
                 {"unit", first.a.unit},
                 {"tensor", key.tensor},
                 {"visit", key.visit},
                 {"shape", first.shape},
                 {"a", to_json(first.a)},
                 {"b", to_json(first.b)},
                 {"values", json()}};
  if (key.micro_batch != 0) {
    result["a"]["rank"] = rank_of(key.micro_batch, r.a.header);
    result["b"]["rank"] = rank_of(key.micro_batch, r.b.header);
  }
  if (r.values) {
    result["values"] = {{"num_differing", r.values->num_differing},
                        {"first_index", r.values->first_index},
                        {"a", number(double{r.values->a})},
                        {"b", number(double{r.values->b})},
                        {"max_abs_difference", number(r.values->max_abs)},
                        {"max_ulps", r.values->max_ulps}};
  }
  return result;
}

}  // namespace

std::vector<std::string> lines_of(const DivergenceResult& r) {
  const DivergenceReport& report = r.report;
  std::vector<std::string> lines = {run_text("A", r.a), run_text("B", r.b)};
  std::ranges::move(causes(r.a.header, r.b.header), std::back_inserter(lines));
  const std::string steps = fmt::format("steps {} to {}", report.first_step, report.last_step);
  if (!report.first) {
    lines.push_back(fmt::format("Nothing differs: {} of {} are equal.",
                                plural(report.num_compared, "checksum"), steps));
  } else {
    const Divergence& first = *report.first;
    const std::string visit = first.key.visit > 1 ? fmt::format(", visit {}", first.key.visit) : "";
    lines.push_back(fmt::format("First difference: {}, {}", place_text(first.key, r),
                                title_of(first.key.phase)));
    lines.push_back(fmt::format("  unit {}, tensor {}{}, shape ({})", engine::escaped(first.a.unit),
                                engine::escaped(first.key.tensor), visit,
                                fmt::join(first.shape, ", ")));
    if (r.values) lines.push_back(values_text(*r.values, first));
    lines.push_back(side_text("A", first.a));
    lines.push_back(side_text("B", first.b));
    lines.push_back(fmt::format(
        "{} before it {} equal; of all {} of {}, {} differ.", plural(report.num_before, "checksum"),
        report.num_before == 1 ? "is" : "are", engine::with_commas(report.num_compared), steps,
        engine::with_commas(report.num_differing)));
    if (first.key.step == report.first_step && report.first_step > 1) {
      lines.emplace_back(
          "Its step is the first that was compared: the runs may have parted earlier.");
    }
  }
  if (!r.remark.empty()) lines.push_back(engine::escaped(r.remark));
  for (const NotCompared& item : report.not_compared) {
    lines.push_back(fmt::format("Not compared ({}): {}", engine::with_commas(item.count),
                                engine::escaped(item.reason)));
  }
  return lines;
}

nlohmann::ordered_json to_json(const DivergenceResult& r) {
  json not_compared = json::array();
  for (const NotCompared& item : r.report.not_compared) {
    not_compared.push_back({{"reason", item.reason}, {"count", item.count}});
  }
  return {
      {"a", to_json(r.a)},
      {"b", to_json(r.b)},
      {"arithmetic_that_differs", to_json(differing_arithmetic(r.a.header, r.b.header))},
      {"options_that_differ", to_json(differing_options(r.a.header.options, r.b.header.options))},
      {"first_step", r.report.first_step},
      {"last_step", r.report.last_step},
      {"num_compared", r.report.num_compared},
      {"num_before_first", r.report.num_before},
      {"num_differing", r.report.num_differing},
      {"first", first_json(r)},
      {"not_compared", std::move(not_compared)},
      {"remark", r.remark.empty() ? json() : json(r.remark)}};
}

}  // namespace tessera::tools
