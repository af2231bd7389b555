#include "tools/planning/plan_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <string_view>
#include <tuple>

#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/planning/plan_report.h"
#include "tools/report/step_text.h"

namespace tessera::tools {

namespace {

std::string size_text(std::int64_t nbytes) { return nbytes_text(static_cast<double>(nbytes)); }

bool are_equal(const StepRecord& a, const StepRecord& b) {
  const auto peaks = [](const StepRecord& s) {
    return std::tuple(s.step_memory.peak_nbytes, s.step_memory.peak_total_nbytes,
                      s.step_host_memory.peak_nbytes, s.step_host_memory.peak_total_nbytes);
  };
  return peaks(a) == peaks(b) && a.traffic.bytes_sent == b.traffic.bytes_sent &&
         a.traffic.num_collectives == b.traffic.num_collectives && a.step_ms == b.step_ms;
}

std::string equal_to(const std::vector<PlanRow>& rows, std::size_t i) {
  for (std::size_t j = 0; j < i; ++j) {
    if (rows[j].is_planned() && rows[i].is_planned() && are_equal(rows[j], rows[i])) {
      return rows[j].name;
    }
  }
  return "";
}

std::string changes_text(const PlanRow& row) {
  std::string text;
  for (const auto& [option, literal] : row.changes) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", option, literal);
  }
  return text;
}

std::string rate_of(const PlanRow& row) {
  const double rate = row.tokens_per_s();
  return rate < 100 ? fmt::format("{:.2f}", rate) : engine::with_commas(std::llround(rate));
}

struct Column {
  std::string head;
  std::function<std::string(const PlanRow&)> text;
};

bool are_processes(const std::vector<PlanRow>& rows) {
  return std::ranges::any_of(rows, [](const PlanRow& r) { return r.target.num_processes > 1; });
}

std::vector<Column> columns(const std::vector<PlanRow>& rows) {
  std::vector<Column> all = {
      {"memory", [](const PlanRow& r) { return size_text(r.peak_nbytes); }},
      {"sent", [](const PlanRow& r) { return size_text(r.step().traffic.bytes_sent); }},
      {"step", [](const PlanRow& r) { return duration_text(r.step().step_ms); }},
      {"waits", [](const PlanRow& r) { return duration_text(r.step().exposed_comm_ms); }},
      {"tokens/s", rate_of},
      {"MFU", [](const PlanRow& r) { return fmt::format("{:.1f} %", 100 * r.mfu()); }}};
  if (are_processes(rows)) {
    all.insert(all.begin() + 2,
               {"to others", [](const PlanRow& r) { return size_text(bytes_between(r.plan)); }});
  }
  // Norms on their way take a few bytes of the host in any case.
  const auto on_host = [](const PlanRow& r) {
    return r.is_planned() ? r.step().step_host_memory.peak_total_nbytes : 0;
  };
  if (std::ranges::any_of(rows, [&](const PlanRow& r) { return on_host(r) >= 1024; })) {
    all.insert(all.begin() + 1,
               {"on the host", [=](const PlanRow& r) { return size_text(on_host(r)); }});
  }
  if (std::ranges::any_of(rows, [](const PlanRow& r) { return r.budget_nbytes > 0; })) {
    all.push_back({"fits", [](const PlanRow& r) -> std::string {
                     return !r.fits() ? "no" : r.changes.empty() ? "yes" : "changed";
                   }});
  }
  return all;
}

// "8 ranks on CPUs, at 100 GFLOP/s ...", of rows that may be of several.
std::string head_line(const std::vector<PlanRow>& rows) {
  const PlanTarget& first = rows.front().target;
  int least = first.num_ranks, most = first.num_ranks;
  bool same_rates = true;
  const bool uses_host =
      std::ranges::any_of(rows, [](const PlanRow& row) { return row.plan.uses_offload; });
  const auto rates = [&](const PlanRow& row) { return rates_text(row.target.rates, uses_host); };
  for (const PlanRow& row : rows) {
    least = std::min(least, row.target.num_ranks);
    most = std::max(most, row.target.num_ranks);
    same_rates = same_rates && rates(row) == rates(rows.front());
  }
  return fmt::format(
      "{} rank{}{} on {}{}",
      least == most ? engine::with_commas(least)
                    : fmt::format("{} to {}", least, engine::with_commas(most)),
      most == 1 ? "" : "s",
      first.num_processes == 1 ? "" : fmt::format(" in {} processes", first.num_processes),
      first.on_gpus ? "GPUs" : "CPUs", same_rates ? ", at " + rates(rows.front()) : "");
}

void add_table(const std::vector<PlanRow>& rows, std::vector<std::string>& lines) {
  const std::vector<Column> shown = columns(rows);
  std::size_t name_width = 0;
  std::vector<std::size_t> widths;
  for (const PlanRow& row : rows)
    name_width = std::max(name_width, engine::escaped(row.name).size());
  for (const Column& column : shown) {
    std::size_t width = column.head.size();
    for (const PlanRow& row : rows) {
      if (row.is_planned()) width = std::max(width, column.text(row).size());
    }
    widths.push_back(width);
  }
  const auto line = [&](const std::string& name, const auto& cell) {
    std::string text = fmt::format("{:<{}}", name, name_width);
    for (std::size_t i = 0; i < shown.size(); ++i) {
      text += fmt::format("  {:>{}}", cell(shown[i]), widths[i]);
    }
    return text;
  };
  lines.push_back(line("", [](const Column& column) { return column.head; }));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PlanRow& row = rows[i];
    const std::string name = engine::escaped(row.name);
    if (!row.is_planned()) {
      lines.push_back(fmt::format("{:<{}}  cannot be trained so", name, name_width));
      continue;
    }
    lines.push_back(line(name, [&](const Column& column) { return column.text(row); }));
    if (const std::string other = equal_to(rows, i); !other.empty()) {
      lines.back() += fmt::format("  = {}", engine::escaped(other));
    }
  }
}

std::string names_text(const std::vector<PlanRow>& rows, const std::vector<std::size_t>& indices) {
  std::vector<std::string> names;
  for (const std::size_t i : indices) names.push_back(engine::escaped(rows[i].name));
  if (names.size() == 1) return names.front();
  const std::string last = std::move(names.back());
  names.pop_back();
  return fmt::format("{} and {}", fmt::join(names, ", "), last);
}

// The rows of `indices` with the smallest size_text().
std::vector<std::size_t> least_of(const std::vector<PlanRow>& rows,
                                  const std::vector<std::size_t>& indices) {
  std::int64_t least = rows[indices.front()].peak_nbytes;
  for (const std::size_t i : indices) least = std::min(least, rows[i].peak_nbytes);
  std::vector<std::size_t> found;
  for (const std::size_t i : indices) {
    if (size_text(rows[i].peak_nbytes) == size_text(least)) found.push_back(i);
  }
  return found;
}

std::vector<std::string> verdict(const std::vector<PlanRow>& rows) {
  const std::vector<std::size_t> fastest = fastest_of(rows);
  if (fastest.empty()) return {"none of them fits"};
  std::vector<std::size_t> fitting;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].fits()) fitting.push_back(i);
  }
  const PlanRow& first = rows[fastest.front()];
  const char* const of = first.budget_nbytes > 0 ? " that fits" : "";
  const std::string slowest = rate_of(rows[fastest.back()]), rate = rate_of(first);
  std::string line = fmt::format(
      "fastest{}{}: {} with {}{} tokens/s", of, fastest.size() > 1 ? ", a tie within 0.5 %" : "",
      names_text(rows, fastest), slowest == rate ? "" : slowest + " to ", rate);
  const std::vector<std::size_t> frugal = least_of(rows, fastest);
  if (frugal.size() < fastest.size()) {
    line += fmt::format("; of these {} need{} least memory", names_text(rows, frugal),
                        frugal.size() == 1 ? "s" : "");
  }
  const std::vector<std::size_t> least = least_of(rows, fitting);
  return {line, fmt::format("least memory: {} with {}", names_text(rows, least),
                            size_text(rows[least.front()].peak_nbytes))};
}

}  // namespace

bool are_equal(const PlanRow& a, const PlanRow& b) {
  if (a.target.num_ranks != b.target.num_ranks || a.tokens != b.tokens) return false;
  if (!std::ranges::equal(a.plan.steps, b.plan.steps, [](const StepRecord& x, const StepRecord& y) {
        return are_equal(x, y);
      })) {
    return false;
  }
  return a.peak_nbytes == b.peak_nbytes &&
         std::ranges::equal(a.plan.collectives, b.plan.collectives,
                            [&](const PlannedCollective& x, const PlannedCollective& y) {
                              return x.name == y.name && x.label == y.label &&
                                     x.bytes_sent == y.bytes_sent && x.end_ms == y.end_ms &&
                                     a.plan.groups[x.group] == b.plan.groups[y.group];
                            });
}

std::vector<std::size_t> fastest_of(const std::vector<PlanRow>& rows) {
  constexpr double kTie = 0.995;
  double best = 0;
  for (const PlanRow& row : rows) {
    if (row.fits()) best = std::max(best, row.tokens_per_s());
  }
  std::vector<std::size_t> fastest;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].fits() && rows[i].tokens_per_s() >= kTie * best) fastest.push_back(i);
  }
  std::ranges::stable_sort(fastest, std::ranges::greater(),
                           [&](std::size_t i) { return rows[i].tokens_per_s(); });
  return fastest;
}

std::vector<std::string> table_lines(const std::vector<PlanRow>& rows) {
  std::vector<std::string> lines = {head_line(rows)};
  add_table(rows, lines);
  if (are_processes(rows)) lines.emplace_back("to others: what a process sends to other processes");
  for (const PlanRow& row : rows) {
    const std::string name = engine::escaped(row.name);
    if (!row.is_planned()) lines.push_back(fmt::format("{}: {}", name, row.refusal));
    for (const std::string& remark : row.remarks) {
      if (!remark.empty()) lines.push_back(fmt::format("{}: {}", name, remark));
    }
    if (!row.changes.empty()) {
      lines.push_back(fmt::format("{} fits with {}", name, changes_text(row)));
    }
  }
  for (std::string& line : verdict(rows)) lines.push_back(std::move(line));
  return lines;
}

JsonRecord table_record(const std::vector<PlanRow>& rows) {
  std::vector<std::string> literals;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PlanRow& row = rows[i];
    JsonRecord record;
    record.add("name", row.name);
    if (!row.is_planned()) {
      literals.push_back(record.add("refusal", row.refusal).text());
      continue;
    }
    record.add("ranks", row.target.num_ranks)
        .add("peak_bytes", row.peak_nbytes)
        .add("host_peak_bytes", row.step().step_host_memory.peak_total_nbytes)
        .add("sent_bytes", row.step().traffic.bytes_sent)
        .add("num_collectives", row.step().traffic.num_collectives)
        .add("step_ms", row.step().step_ms)
        .add("exposed_comm_ms", row.step().exposed_comm_ms)
        .add("tokens_per_s", row.tokens_per_s())
        .add("mfu", row.mfu());
    if (row.target.num_processes > 1) {
      record.add("bytes_between_processes", bytes_between(row.plan));
    }
    if (const std::string other = equal_to(rows, i); !other.empty()) record.add("equal_to", other);
    if (row.budget_nbytes > 0) {
      JsonRecord options;
      for (const auto& [option, literal] : row.changes) options.add_literal(option, literal);
      record.add("budget_bytes", row.budget_nbytes)
          .add("fits", row.fits())
          .add_literal("options", options.text());
    }
    literals.push_back(record.text());
  }
  std::vector<std::string> fastest;
  for (const std::size_t i : fastest_of(rows))
    fastest.push_back(engine::json_literal(rows[i].name));
  return JsonRecord()
      .add_literal("configurations", fmt::format("[{}]", fmt::join(literals, ",")))
      .add_literal("fastest", fmt::format("[{}]", fmt::join(fastest, ",")));
}

}  // namespace tessera::tools
