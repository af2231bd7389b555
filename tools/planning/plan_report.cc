#include "tools/planning/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>

#include "engine/io/text.h"
#include "tools/report/step_text.h"

namespace tessera::tools {

using engine::MemoryStats;

namespace {

std::string size_text(std::int64_t nbytes) { return nbytes_text(static_cast<double>(nbytes)); }

std::string count_text(std::int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", engine::with_commas(count), what, count == 1 ? "" : "s");
}

std::string peak_literal(const MemoryStats& memory) {
  JsonRecord peaks;
  for (int i = 0; i < engine::kNumCategories; ++i) {
    peaks.add(name_of(static_cast<engine::Category>(i)),
              memory.peak_nbytes[static_cast<std::size_t>(i)]);
  }
  return peaks.add("total", memory.peak_total_nbytes).text();
}

template <class T, class F>
std::string json_array(const std::vector<T>& items, F literal) {
  std::vector<std::string> literals;
  for (const T& item : items) literals.push_back(literal(item));
  return fmt::format("[{}]", fmt::join(literals, ","));
}

// "0 to 3", "0, 2, 4", or "0, 8, 16 ... 4088" of many.
std::string ranks_text(const std::vector<int>& ranks) {
  constexpr std::ptrdiff_t kMostListed = 16, kNumFirst = 3;
  const bool are_neighbours =
      ranks.size() > 2 && ranks.back() - ranks.front() == std::ssize(ranks) - 1;
  if (are_neighbours) return fmt::format("{} to {}", ranks.front(), ranks.back());
  if (std::ssize(ranks) <= kMostListed) return fmt::format("{}", fmt::join(ranks, ", "));
  return fmt::format("{} ... {}", fmt::join(ranks.begin(), ranks.begin() + kNumFirst, ", "),
                     ranks.back());
}

// What rank 0 sends to which others: they may be as near as a chip or as far as another host.
std::map<std::vector<int>, comm::Traffic> traffic_by_ranks(const TrainPlan& plan) {
  std::map<std::vector<int>, comm::Traffic> traffic;
  for (const PlannedCollective& c : plan.collectives) {
    comm::Traffic& t = traffic[plan.groups[c.group]];
    ++t.num_collectives;
    t.bytes_sent += c.bytes_sent;
  }
  return traffic;
}

// The unit of "h.12 forward" and what follows it; and the unit's first number, if it has one.
struct Label {
  explicit Label(std::string_view label)
      : unit(label.substr(0, label.find(' '))), rest(label.substr(unit.size())) {
    for (std::size_t i = 0; i < unit.size(); ++i) {
      const bool is_digit = unit[i] >= '0' && unit[i] <= '9';
      if (!is_digit) kind += unit[i];
      if (is_digit && !kind.ends_with('#')) kind += '#';
      if (is_digit && !number) {
        std::int64_t value = 0;
        std::from_chars(unit.data() + i, unit.data() + unit.size(), value);
        number = value;
      }
    }
  }

  std::string_view unit, rest;
  std::string kind;  // the unit with '#' for its numbers
  std::optional<std::int64_t> number;
};

// Collectives of units that are called alike, of as many bytes each, between the same ranks.
struct Alike {
  std::string_view name;
  std::map<std::int64_t, std::string_view> units;  // by number
  std::string_view rest;
  std::int64_t bytes_sent;  // of each
  std::int64_t count = 0;
  double exposed_ms = 0;  // of all

  // "h.1 to h.47 forward", "3 of h.0 to h.8 forward"
  std::string label() const {
    const auto& [first, first_unit] = *units.begin();
    const auto& [last, last_unit] = *units.rbegin();
    if (units.size() == 1) return fmt::format("{}{}", first_unit, rest);
    const auto num_units = std::ssize(units);
    if (num_units == 2) return fmt::format("{}, {}{}", first_unit, last_unit, rest);
    return fmt::format("{}{} to {}{}",
                       last - first == num_units - 1 ? "" : fmt::format("{} of ", num_units),
                       first_unit, last_unit, rest);
  }
};

// In the order in which the first of each is called.
std::vector<Alike> alike_collectives(const TrainPlan& plan) {
  using Key =
      std::tuple<std::string_view, std::string, std::string_view, std::int64_t, std::size_t>;
  std::vector<Alike> all;
  std::map<Key, std::size_t> places;
  for (const PlannedCollective& c : plan.collectives) {
    const Label label(c.label);
    const auto [place, is_new] =
        places.try_emplace(Key{c.name, label.kind, label.rest, c.bytes_sent, c.group}, all.size());
    if (is_new) {
      all.push_back({.name = c.name, .units = {}, .rest = label.rest, .bytes_sent = c.bytes_sent});
    }
    Alike& alike = all[place->second];
    alike.units.emplace(label.number.value_or(0), label.unit);
    ++alike.count;
    alike.exposed_ms += c.is_exposed() ? c.exposed_ms : 0;
  }
  return all;
}

void add_collectives(const TrainPlan& plan, std::vector<std::string>& lines) {
  const auto sent = [](const comm::Traffic& t) {
    return fmt::format("{} in {}", size_text(t.bytes_sent),
                       count_text(t.num_collectives, "collective"));
  };
  const comm::Traffic& first = plan.steps.front().traffic;
  lines.push_back(
      fmt::format("a step sends {} (the first: {} in {}):", sent(plan.steps.back().traffic),
                  size_text(first.bytes_sent), first.num_collectives));
  if (plan.compresses_after > 1) {
    lines.push_back(fmt::format("  up to step {}, before its hook compresses, {}",
                                plan.compresses_after, sent(planned_step(plan, 2).traffic)));
  }
  const std::vector<Alike> collectives = alike_collectives(plan);
  const auto times = [](const Alike& c) {
    return c.count == 1 ? "" : fmt::format("{} x ", engine::with_commas(c.count));
  };
  std::size_t width = 0;
  for (const Alike& c : collectives) width = std::max(width, times(c).size());
  for (const Alike& c : collectives) {
    std::string line = fmt::format("  {:>{}}{:<15}{:<28}{:>16} B", times(c), width, c.name,
                                   c.label(), engine::with_commas(c.bytes_sent));
    if (c.count > 1) line += fmt::format(" each, {}", size_text(c.count * c.bytes_sent));
    if (c.exposed_ms > 0) line += fmt::format("  compute waits {}", duration_text(c.exposed_ms));
    lines.push_back(std::move(line));
  }
  const auto by_ranks = traffic_by_ranks(plan);
  if (by_ranks.size() < 2) return;
  for (const auto& [ranks, traffic] : by_ranks) {
    lines.push_back(fmt::format("  {:<{}}{:>16} B in {}",
                                fmt::format("between ranks {}", ranks_text(ranks)), width + 43,
                                engine::with_commas(traffic.bytes_sent),
                                count_text(traffic.num_collectives, "collective")));
  }
}

std::string nbytes_line(std::string_view name, std::int64_t nbytes) {
  return fmt::format("  {:<19}{:>16} B  {:>12}", name, engine::with_commas(nbytes),
                     size_text(nbytes));
}

void add_categories(const std::vector<PlannedMemory>& memory, std::string_view indent,
                    std::vector<std::string>& lines) {
  for (const PlannedMemory& m : memory) {
    if (m.nbytes == 0) continue;
    lines.push_back(nbytes_line(fmt::format("{}{}", indent, name_of(m.category)), m.nbytes));
    for (const PlanTerm& term : m.terms) {
      lines.push_back(
          fmt::format("    {:>33} B  = {}", engine::with_commas(term.nbytes), term.text));
    }
  }
}

std::string memory_literal(const std::vector<PlannedMemory>& memory) {
  return json_array(memory, [](const PlannedMemory& m) {
    const auto terms = json_array(m.terms, [](const PlanTerm& term) {
      return JsonRecord().add("text", term.text).add("bytes", term.nbytes).text();
    });
    return JsonRecord()
        .add("category", name_of(m.category))
        .add("bytes", m.nbytes)
        .add_literal("terms", terms)
        .text();
  });
}

// What needs more than a step, which is what the rest is about.
void add_beside_steps(const TrainPlan& plan, std::vector<std::string>& lines) {
  const std::int64_t step = plan.steps.back().step_memory.peak_total_nbytes;
  if (plan.repeated) {
    lines.push_back(
        nbytes_line("made again, in all", plan.repeated->step_memory.peak_total_nbytes));
  }
  for (const PlannedPass& pass : plan.unrecorded) {
    if (pass.nbytes > step) lines.push_back(nbytes_line(pass.name + ", in all", pass.nbytes));
  }
  if (plan.between_steps_nbytes > step) {
    lines.push_back(nbytes_line("between steps", plan.between_steps_nbytes));
  }
}

}  // namespace

std::string rates_text(const engine::MetaRates& rates, bool uses_host) {
  const auto bytes = [](double per_s) { return rate_text(per_s * 1e-9, "B/s"); };
  const std::string compute = rate_text(rates.flops_per_s * 1e-9, "FLOP/s");
  const std::string memory = bytes(rates.bytes_per_s), link = bytes(rates.link_bytes_per_s);
  if (!uses_host)
    return fmt::format("{}, {} of memory and {} between ranks", compute, memory, link);
  return fmt::format("{}, {} of memory, {} between ranks, {} to the host and {} of its memory",
                     compute, memory, link, bytes(rates.host_link_bytes_per_s),
                     bytes(rates.host_bytes_per_s));
}

std::vector<std::string> memory_lines(const TrainPlan& plan) {
  std::vector<std::string> lines;
  const StepRecord& step = plan.steps.back();
  lines.push_back(fmt::format("memory of a step, per rank: {}; most at {}",
                              size_text(step.step_memory.peak_total_nbytes), plan.peak_at));
  add_categories(plan.memory, "", lines);
  add_beside_steps(plan, lines);
  const std::int64_t on_host = step.step_host_memory.peak_total_nbytes;
  if (on_host > 0) {
    lines.push_back(nbytes_line("on the host", on_host));
    add_categories(plan.host_memory, "  ", lines);
  }
  return lines;
}

std::vector<std::string> largest_lines(const TrainPlan& plan) {
  constexpr std::size_t kNumCategories = 3, kNumTerms = 3;
  const auto keep_largest = [](auto& items, std::size_t count) {
    std::ranges::stable_sort(items,
                             [](const auto& a, const auto& b) { return a.nbytes > b.nbytes; });
    if (items.size() > count)
      items.erase(items.begin() + static_cast<std::ptrdiff_t>(count), items.end());
  };
  std::vector<PlannedMemory> largest = plan.memory;
  keep_largest(largest, kNumCategories);
  for (PlannedMemory& m : largest) keep_largest(m.terms, kNumTerms);
  std::vector<std::string> lines = {
      fmt::format("the largest of the last, which needs most at {}:", plan.peak_at)};
  add_categories(largest, "", lines);
  add_beside_steps(plan, lines);
  return lines;
}

std::vector<PlanTerm> sent_terms(const TrainPlan& plan) {
  std::vector<PlanTerm> terms;
  for (const Alike& c : alike_collectives(plan)) {
    const std::string times =
        c.count == 1 ? "" : fmt::format("{} x ", engine::with_commas(c.count));
    terms.push_back(
        {fmt::format("{}{} B, {} {}", times, engine::with_commas(c.bytes_sent), c.name, c.label()),
         c.count * c.bytes_sent});
  }
  return terms;
}

std::int64_t bytes_between(const TrainPlan& plan) {
  std::int64_t nbytes = 0;
  for (const PlannedCollective& c : plan.collectives) nbytes += c.bytes_between;
  return nbytes;
}

std::vector<std::string> plan_lines(const TrainPlan& plan, const PlanTarget& target) {
  const bool are_processes = target.num_processes > 1;
  std::vector<std::string> lines = {
      fmt::format("plan {:016x}, {}{} on {}", plan.hash, count_text(target.num_ranks, "rank"),
                  are_processes ? fmt::format(" in {} processes", target.num_processes) : "",
                  target.on_gpus ? "GPUs" : "CPUs")};
  const std::vector<std::string> memory = memory_lines(plan);
  lines.insert(lines.end(), memory.begin(), memory.end());
  add_collectives(plan, lines);
  if (are_processes) {
    lines.push_back(
        fmt::format("a process sends {} a step to others; {}", size_text(bytes_between(plan)),
                    target.ranks_per_process() == 1 ? "each rank is one"
                                                    : "its ranks read each other's memory"));
  }
  const StepRecord& step = plan.steps.back();
  const bool uses_host = plan.uses_offload;
  lines.push_back(fmt::format("at {} a step would take {}, {} of it waiting for collectives{}",
                              rates_text(target.rates, uses_host), duration_text(step.step_ms),
                              duration_text(step.exposed_comm_ms),
                              uses_host ? " and the host" : ""));
  lines.push_back(fmt::format(
      "a step has {} launches of computation and collectives, which took this host {} ({} each)",
      engine::with_commas(plan.num_launches), duration_text(plan.host_ms),
      duration_text(plan.host_ms / static_cast<double>(plan.num_launches))));
  return lines;
}

JsonRecord plan_record(const TrainPlan& plan, const PlanTarget& target) {
  const auto collectives = json_array(plan.collectives, [](const PlannedCollective& c) {
    return JsonRecord()
        .add("name", c.name)
        .add("label", c.label)
        .add("sent_bytes", c.bytes_sent)
        .add("end_ms", c.end_ms)
        .add("exposed_ms", c.exposed_ms)
        .add("group", c.group)
        .add("bytes_between_processes", c.bytes_between)
        .text();
  });
  const auto groups = json_array(plan.groups, [](const std::vector<int>& ranks) {
    return fmt::format("[{}]", fmt::join(ranks, ","));
  });
  const StepRecord& step = plan.steps.back();
  JsonRecord record;
  record.add("hash", fmt::format("{:016x}", plan.hash))
      .add("ranks", target.num_ranks)
      .add("processes", target.num_processes)
      .add("device", target.on_gpus ? "cuda" : "cpu")
      .add_literal("peak_bytes", peak_literal(step.step_memory))
      .add_literal("host_peak_bytes", peak_literal(step.step_host_memory))
      .add("peak_at", plan.peak_at)
      .add("sent_bytes", step.traffic.bytes_sent)
      .add("num_collectives", step.traffic.num_collectives)
      .add("first_step_sent_bytes", plan.steps.front().traffic.bytes_sent)
      .add("first_step_num_collectives", plan.steps.front().traffic.num_collectives)
      .add("step_ms", step.step_ms)
      .add("exposed_comm_ms", step.exposed_comm_ms)
      .add("between_steps_bytes", plan.between_steps_nbytes)
      .add("num_launches", plan.num_launches)
      .add("host_ms", plan.host_ms)
      .add_literal("memory", memory_literal(plan.memory))
      .add_literal("host_memory", memory_literal(plan.host_memory))
      .add_literal("collectives", collectives)
      .add_literal("groups", groups);
  for (const PlannedPass& pass : plan.unrecorded) {
    record.add(fmt::format("{}_peak_bytes", pass.name), pass.nbytes);
  }
  if (plan.repeated)
    record.add_literal("repeated_peak_bytes", peak_literal(plan.repeated->step_memory));
  return record;
}

}  // namespace tessera::tools
