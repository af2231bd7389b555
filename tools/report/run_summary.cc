#include "tools/report/run_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/io/text.h"
#include "tools/report/step_text.h"
#include "tools/report/time_split.h"

namespace tessera::tools {
namespace {

constexpr std::array<std::string_view, 5> kParts = {"compute", "exposed comm", "optimizer", "data",
                                                    "other"};

// Between the neighbours, as most programs count percentiles.
double percentile(const std::vector<double>& sorted, double part) {
  const double at = part * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(at));
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], at - static_cast<double>(below));
}

RunSummary::Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {percentile(values, 0.5), percentile(values, 0.1), percentile(values, 0.9)};
}

// Of an even number the smaller one of both in the middle, so that it is one that there was.
std::int64_t median_of(std::vector<std::int64_t> values) {
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

RunSummary::Bytes peaks_of(const StepRecord& r) {
  return {.peak_nbytes = r.memory.peak_total_nbytes,
          .host_peak_nbytes =
              r.host_memory ? std::optional(r.host_memory->peak_total_nbytes) : std::nullopt};
}

// "3.0 MiB at the peak of rank 0, planned 2.9 MiB"
std::string beside(std::int64_t measured, const char* what,
                   const std::optional<std::int64_t>& planned) {
  std::string text = fmt::format("{} {}", nbytes_text(static_cast<double>(measured)), what);
  if (planned) text += fmt::format(", planned {}", nbytes_text(static_cast<double>(*planned)));
  return text;
}

std::string peak_text(double percent) {
  if (percent >= 100.5) return ", above the peak measured at the start, while other programs ran";
  return fmt::format(", {:.0f} % of the peak measured at the start", percent);
}

JsonRecord to_json(const RunSummary::Bytes& bytes) {
  JsonRecord record;
  record.add("peak_bytes", bytes.peak_nbytes);
  if (bytes.host_peak_nbytes) record.add("host_peak_bytes", *bytes.host_peak_nbytes);
  return record.add("sent_bytes", bytes.sent_nbytes);
}

JsonRecord to_json(const RunSummary::Spread& s) {
  return JsonRecord().add("median", s.median).add("p10", s.p10).add("p90", s.p90);
}

}  // namespace

void RunSummary::add(const StepRecord& r, std::optional<double> peak_percent) {
  memory_ = r.memory;
  measured_ = peaks_of(r);
  num_skipped_ += r.skipped.empty() ? 0 : 1;
  ++num_steps_;
  samples_.push_back(
      {.step = r.step,
       .step_ms = r.step_ms,
       .items_per_s = r.items_per_s,
       .sent_nbytes = r.traffic.bytes_sent,
       .parts_ms = {r.compute_ms, r.exposed_comm_ms, r.optimizer_ms, r.data_ms, r.other_ms()},
       .peak_percent = peak_percent});
  if (samples_.size() > kMaxSamples) samples_.pop_front();
}

std::int64_t RunSummary::num_warmup() const {
  return num_steps_ == 1 ? 0 : std::clamp<std::int64_t>(num_steps_ / 10, 1, 10);
}

std::int64_t RunSummary::num_left_out() const {
  const std::int64_t num_forgotten = num_steps_ - std::ssize(samples_);
  return std::max<std::int64_t>(num_warmup() - num_forgotten, 0);
}

void RunSummary::add_plan(const std::function<const StepRecord&(std::int64_t step)>& planned) {
  if (samples_.empty()) return;
  std::vector<std::int64_t> sent;
  for (auto it = samples_.begin() + num_left_out(); it != samples_.end(); ++it) {
    sent.push_back(planned(it->step).traffic.bytes_sent);
  }
  planned_ = peaks_of(planned(samples_.back().step));
  planned_->sent_nbytes = median_of(std::move(sent));
}

std::optional<RunSummary::Figures> RunSummary::figures() const {
  if (samples_.empty()) return std::nullopt;
  Figures f;
  f.num_warmup = num_warmup();
  f.num_skipped = num_skipped_;
  f.memory = memory_;
  f.measured = measured_;
  f.planned = planned_;
  std::vector<double> step_ms, items_per_s, percents;
  TimeSplit split(kParts.size());
  std::vector<std::int64_t> sent;
  for (auto it = samples_.begin() + num_left_out(); it != samples_.end(); ++it) {
    const Sample& sample = *it;
    sent.push_back(sample.sent_nbytes);
    step_ms.push_back(sample.step_ms);
    items_per_s.push_back(sample.items_per_s);
    if (sample.peak_percent) percents.push_back(*sample.peak_percent);
    split.add(sample.step_ms, sample.parts_ms);
  }
  f.num_steps = static_cast<std::int64_t>(step_ms.size());
  f.measured.sent_nbytes = median_of(std::move(sent));
  for (std::size_t i = 0; i < kParts.size(); ++i) {
    if (const auto share = split.share(i)) f.parts.push_back({kParts[i], *share});
  }
  f.step_ms = spread(std::move(step_ms));
  f.items_per_s = spread(std::move(items_per_s));
  if (!percents.empty()) f.peak_percent = spread(std::move(percents)).median;
  return f;
}

double RunSummary::Figures::share(std::string_view part) const {
  for (const Part& p : parts) {
    if (p.name == part) return p.share;
  }
  return 0;
}

std::vector<std::pair<std::string, std::string>> RunSummary::rows(const Figures& f,
                                                                  std::string_view items) {
  std::vector<std::pair<std::string, std::string>> rows;
  rows.emplace_back(
      "steps", fmt::format("{} measured, {} before them left out{}", f.num_steps, f.num_warmup,
                           f.num_skipped == 0 ? ""
                                              : fmt::format("; {} update{} skipped", f.num_skipped,
                                                            f.num_skipped == 1 ? "" : "s")));
  rows.emplace_back("step", fmt::format("{:.1f} ms median, {:.1f} to {:.1f} ms for 8 of 10",
                                        f.step_ms.median, f.step_ms.p10, f.step_ms.p90));
  std::vector<std::string> parts;
  for (const Part& part : f.parts) {
    parts.push_back(fmt::format("{} {:.1f} %", part.name, 100 * part.share));
  }
  rows.emplace_back("time", engine::join(parts, ", "));
  rows.emplace_back("speed", fmt::format("{:.0f} {}/s median{}", f.items_per_s.median, items,
                                         f.peak_percent ? peak_text(*f.peak_percent) : ""));
  std::vector<std::pair<std::int64_t, int>> peaks;
  for (int c = 0; c < engine::kNumCategories; ++c) {
    peaks.emplace_back(-f.memory.peak_nbytes[static_cast<std::size_t>(c)], c);
  }
  std::sort(peaks.begin(), peaks.end());
  std::vector<std::string> largest;
  for (const auto& [negative, c] : peaks) {
    if (negative == 0 || largest.size() == 3) break;
    largest.push_back(fmt::format("{} {}", name_of(static_cast<engine::Category>(c)),
                                  nbytes_text(-static_cast<double>(negative))));
  }
  const auto planned = [&](auto member) -> std::optional<std::int64_t> {
    return f.planned ? std::optional<std::int64_t>((*f.planned).*member) : std::nullopt;
  };
  constexpr const char* kAtPeak = "at the peak of rank 0";
  rows.emplace_back(
      "memory", fmt::format("{} (largest: {})",
                            beside(f.measured.peak_nbytes, kAtPeak, planned(&Bytes::peak_nbytes)),
                            engine::join(largest, ", ")));
  if (f.measured.host_peak_nbytes) {
    rows.emplace_back("on host", beside(*f.measured.host_peak_nbytes, kAtPeak,
                                        f.planned ? f.planned->host_peak_nbytes : std::nullopt));
  }
  rows.emplace_back(
      "sent", beside(f.measured.sent_nbytes, "a step by rank 0", planned(&Bytes::sent_nbytes)));
  return rows;
}

JsonRecord RunSummary::record(const Figures& f, std::string_view items) {
  JsonRecord record;
  record.add("steps", f.num_steps).add("warmup_steps", f.num_warmup);
  record.add_literal("step_ms", to_json(f.step_ms).text());
  record.add_literal(std::string(items) + "_per_s", to_json(f.items_per_s).text());
  JsonRecord shares;
  for (const Part& part : f.parts) {
    std::string name(part.name);
    std::replace(name.begin(), name.end(), ' ', '_');
    shares.add(name, part.share);
  }
  record.add_literal("share", shares.text());
  if (f.peak_percent) record.add("peak_percent", *f.peak_percent);
  record.add_all(to_json(f.measured));
  if (f.planned) record.add_literal("planned", to_json(*f.planned).text());
  return record;
}

}  // namespace tessera::tools
