#include "tools/report/step_text.h"

#include <fmt/format.h>

#include <array>

#include "tools/cli/console.h"

namespace tessera::tools {
namespace {

// compute, exposed communication, optimizer, data: those that are known. What they leave is little,
// and for readers of the log.
std::string parts_text(const StepRecord& r) {
  std::string text;
  if (r.compute_ms) text += fmt::format("compute {:6.1f}, ", *r.compute_ms);
  text += fmt::format("exposed comm {:6.1f}, ", r.exposed_comm_ms);
  if (r.optimizer_ms) text += fmt::format("optimizer {:5.1f}, ", *r.optimizer_ms);
  return text + fmt::format("data {:5.1f}", r.data_ms);
}

// As wide for every step. A peak that is exceeded was measured while other programs ran: how many
// times it is says nothing.
std::string peak_text(double percent) {
  return fmt::format(", {:>13}",
                     percent < 100.5 ? fmt::format("{:.0f} % of peak", percent) : "above peak");
}

}  // namespace

std::string step_text(const StepRecord& r, const StepTextOptions& options) {
  constexpr int kNever = 6;
  struct Field {
    int rank;  // the lowest is left out first
    std::string text;
  };
  const std::string peak = options.peak_percent ? peak_text(*options.peak_percent) : "";
  const Field fields[] = {
      {kNever, fmt::format("step {:>5}/{}", r.step, options.num_steps)},
      {kNever, fmt::format(" | loss {:7.4f}", r.loss)},
      {5, fmt::format(" | norm {:7.3f}", r.grad_norm)},
      {4, fmt::format(" | lr {:.2e}", r.lr)},
      {kNever, fmt::format(" | {:7.1f} ms", r.step_ms)},
      {1, ": " + parts_text(r)},
      {kNever, fmt::format(" | {:7.0f} {}/s", r.items_per_s, options.items)},
      {2, peak},
      {3, fmt::format(" | {:>9}", nbytes_text(static_cast<double>(r.memory.peak_total_nbytes)))},
      {kNever, " | ETA " + options.eta}};
  std::string line;
  for (int left_out = 0; left_out < kNever; ++left_out) {
    line.clear();
    for (const Field& field : fields) {
      if (field.rank > left_out) line += field.text;
    }
    if (!options.columns || line.size() <= *options.columns) break;
  }
  return line;
}

std::string status_text(const StepRecord& r, const StepTextOptions& options) {
  const double part = static_cast<double>(r.step) / static_cast<double>(options.num_steps);
  return fmt::format("{} {:3.0f} % step {}/{} | ETA {} | loss {:.4f} | {:.1f} ms | {:.0f} {}/s",
                     progress_bar(part, 22), 100 * part, r.step, options.num_steps, options.eta,
                     r.loss, r.step_ms, r.items_per_s, options.items);
}

std::string nbytes_text(double nbytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  constexpr double kRoundsUp = 1023.95;  // to 1024.0
  std::size_t unit = 0;
  for (; nbytes >= (unit == 0 ? 1024 : kRoundsUp) && unit + 1 < kUnits.size(); ++unit) {
    nbytes /= 1024;
  }
  return unit == 0 ? fmt::format("{:.0f} B", nbytes)
                   : fmt::format("{:.1f} {}", nbytes, kUnits[unit]);
}

std::string duration_text(double ms) {
  const auto text = [](double value, const char* unit) {
    return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : 1, unit);
  };
  if (ms == 0) return "0 ms";
  if (ms < 0.99995) return text(ms * 1e3, "us");
  if (ms < 999.95) return text(ms, "ms");
  return text(ms * 1e-3, "s");
}

std::string rate_text(double giga_per_s, std::string_view unit) {
  constexpr std::array<const char*, 6> kPrefixes = {"", "k", "M", "G", "T", "P"};
  constexpr double kRoundsUp = 999.95;  // to 1000
  double rate = giga_per_s * 1e9;
  std::size_t prefix = 0;
  for (; rate >= kRoundsUp && prefix + 1 < kPrefixes.size(); ++prefix) rate /= 1000;
  return fmt::format("{:.4g} {}{}", rate, kPrefixes[prefix], unit);
}

}  // namespace tessera::tools
