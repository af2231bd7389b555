#include "tools/train/step_text.h"

#include <fmt/format.h>

#include <array>

#include "tools/train/console.h"

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

// More is no share of it: the peak was measured while other programs ran.
std::string peak_text(double percent) {
  return percent > 100 ? ",    above peak" : fmt::format(", {:3.0f} % of peak", percent);
}

}  // namespace

std::string step_text(const StepRecord& r, const StepTextOptions& options) {
  return fmt::format(
      "step {:>5}/{} | loss {:7.4f} | norm {:7.3f} | lr {:.2e} | {:7.1f} ms: {} | {:7.0f} {}/s{} | "
      "{:>9} | ETA {}",
      r.step, options.num_steps, r.loss, r.grad_norm, r.lr, r.step_ms, parts_text(r), r.items_per_s,
      options.items, options.peak_percent ? peak_text(*options.peak_percent) : "",
      nbytes_text(static_cast<double>(r.memory.peak_total_nbytes)), options.eta);
}

std::string status_text(const StepRecord& r, const StepTextOptions& options) {
  const double part = static_cast<double>(r.step) / static_cast<double>(options.num_steps);
  return fmt::format("{} {:3.0f} % step {}/{} | ETA {} | loss {:.4f} | {:.1f} ms | {:.0f} {}/s",
                     progress_bar(part, 22), 100 * part, r.step, options.num_steps, options.eta,
                     r.loss, r.step_ms, r.items_per_s, options.items);
}

std::string nbytes_text(double nbytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  for (; nbytes >= 1024 && unit + 1 < kUnits.size(); ++unit) nbytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} B", nbytes)
                   : fmt::format("{:.1f} {}", nbytes, kUnits[unit]);
}

}  // namespace tessera::tools
