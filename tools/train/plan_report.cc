#include "tools/train/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <string_view>

#include "engine/io/text.h"
#include "tools/train/plan_memory.h"

namespace tessera::tools {

using engine::MemoryStats;

namespace {

std::string mib(std::int64_t nbytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(nbytes) / 0x1p20);
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

// "0 to 3", or "0, 2, 4".
std::string ranks_text(const std::vector<int>& ranks) {
  const bool are_neighbours =
      ranks.size() > 2 && ranks.back() - ranks.front() == std::ssize(ranks) - 1;
  if (are_neighbours) return fmt::format("{} to {}", ranks.front(), ranks.back());
  return fmt::format("{}", fmt::join(ranks, ", "));
}

// What rank 0 sends to which others: they may be as near as a chip or as far as another host.
std::map<std::vector<int>, comm::Traffic> traffic_by_ranks(const TrainPlan& plan) {
  std::map<std::vector<int>, comm::Traffic> traffic;
  for (const PlannedCollective& c : plan.collectives) {
    comm::Traffic& t = traffic[c.ranks];
    ++t.num_collectives;
    t.bytes_sent += c.bytes_sent;
  }
  return traffic;
}

// Collectives of one name and label that follow each other in the same place of each step count
// together.
void add_collectives(const TrainPlan& plan, std::vector<std::string>& lines) {
  const StepRecord& step = plan.steps.back();
  lines.push_back(fmt::format(
      "a step sends {} in {} collectives (the first: {} in {}):", mib(step.traffic.bytes_sent),
      step.traffic.num_collectives, mib(plan.steps.front().traffic.bytes_sent),
      plan.steps.front().traffic.num_collectives));
  if (plan.compresses_behind > 1) {
    const comm::Traffic& before = planned_step(plan, 2).traffic;
    lines.push_back(fmt::format("  up to step {}, before its hook compresses, {} in {} collectives",
                                plan.compresses_behind, mib(before.bytes_sent),
                                before.num_collectives));
  }
  for (const PlannedCollective& c : plan.collectives) {
    lines.push_back(
        fmt::format("  {:<15}{:<28}{:>16} B{}", c.name, c.label, engine::with_commas(c.bytes_sent),
                    c.is_exposed() ? fmt::format("  compute waits {:.3f} ms", c.exposed_ms) : ""));
  }
  const auto by_ranks = traffic_by_ranks(plan);
  if (by_ranks.size() < 2) return;
  for (const auto& [ranks, traffic] : by_ranks) {
    lines.push_back(fmt::format("  {:<43}{:>16} B in {} collective{}",
                                fmt::format("between ranks {}", ranks_text(ranks)),
                                engine::with_commas(traffic.bytes_sent), traffic.num_collectives,
                                traffic.num_collectives == 1 ? "" : "s"));
  }
}

std::string nbytes_line(std::string_view name, std::int64_t nbytes) {
  return fmt::format("  {:<19}{:>16} B  {:>12}", name, engine::with_commas(nbytes), mib(nbytes));
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
  for (const PlannedPass& pass : plan.beside) {
    if (pass.nbytes > step) lines.push_back(nbytes_line(pass.name + ", in all", pass.nbytes));
  }
  if (plan.between_steps_nbytes > step) {
    lines.push_back(nbytes_line("between steps", plan.between_steps_nbytes));
  }
}

}  // namespace

std::vector<std::string> memory_lines(const TrainPlan& plan) {
  std::vector<std::string> lines;
  const StepRecord& step = plan.steps.back();
  lines.push_back(fmt::format("memory of a step, per rank: {}; most at {}",
                              mib(step.step_memory.peak_total_nbytes), plan.peak_at));
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

std::vector<std::string> plan_lines(const TrainPlan& plan, const PlanTarget& target) {
  std::vector<std::string> lines = {fmt::format("plan {:016x}, {} rank{} on {}", plan.hash,
                                                target.num_ranks, target.num_ranks == 1 ? "" : "s",
                                                target.on_gpus ? "GPUs" : "CPUs")};
  const std::vector<std::string> memory = memory_lines(plan);
  lines.insert(lines.end(), memory.begin(), memory.end());
  add_collectives(plan, lines);
  const StepRecord& step = plan.steps.back();
  const engine::MetaRates& rates = target.rates;
  const bool uses_host = plan.uses_offload;
  lines.push_back(fmt::format(
      "at {:.0f} GFLOP/s, {:.0f} GB/s of memory{} {:.1f} GB/s between ranks{} a step would take "
      "{:.1f} ms, {:.1f} of them waiting for {}",
      rates.flops_per_s * 1e-9, rates.bytes_per_s * 1e-9, uses_host ? "," : " and",
      rates.link_bytes_per_s * 1e-9,
      uses_host ? fmt::format(", {:.1f} GB/s to the host and {:.1f} GB/s of its memory",
                              rates.host_link_bytes_per_s * 1e-9, rates.host_bytes_per_s * 1e-9)
                : "",
      step.step_ms, step.exposed_comm_ms, uses_host ? "collectives and the host" : "collectives"));
  lines.push_back(
      fmt::format("a step has {} launches of computation and collectives, which took this host "
                  "{:.1f} ms ({:.2f} us each)",
                  plan.num_launches, plan.host_ms,
                  1e3 * plan.host_ms / static_cast<double>(plan.num_launches)));
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
        .add_literal("ranks", fmt::format("[{}]", fmt::join(c.ranks, ",")))
        .text();
  });
  const StepRecord& step = plan.steps.back();
  JsonRecord record;
  record.add("hash", fmt::format("{:016x}", plan.hash))
      .add("ranks", target.num_ranks)
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
      .add_literal("collectives", collectives);
  for (const PlannedPass& pass : plan.beside) {
    record.add(fmt::format("{}_peak_bytes", pass.name), pass.nbytes);
  }
  if (plan.repeated)
    record.add_literal("repeated_peak_bytes", peak_literal(plan.repeated->step_memory));
  return record;
}

}  // namespace tessera::tools
