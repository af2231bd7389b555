#include "tools/report/hook_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "shard/hooks/hook.h"

namespace tessera::tools {

using shard::HookKind;

namespace {

std::string rate(double before, double after) {
  return after == 0 ? "not sent" : fmt::format("{:.1f}x", before / after);
}

}  // namespace

HookReport::HookReport(const shard::Fsdp& fsdp, const shard::HookOptions& options)
    : is_given_(fsdp.options().reducer != nullptr),
      is_noop_(options.kind == HookKind::kNoop),
      compresses_(options.compresses()),
      text_(describe(options)) {
  for (const auto& unit : fsdp.units()) {
    const auto* const hook = dynamic_cast<const shard::HookReducer*>(unit->reducer());
    if (hook == nullptr) continue;
    on_device_ += hook->error_nbytes(false);
    on_host_ += hook->error_nbytes(true);
    for (const shard::HookTraffic& t : hook->traffic()) {
      rows_.push_back(
          {t.parameter->name, t.parameter->shape.str(), t.rank, t.nbytes_before, t.nbytes_after});
      before_ += t.nbytes_before;
      after_ += t.nbytes_after;
    }
  }
}

std::vector<std::string> HookReport::lines() const {
  if (!is_given_) return {};
  std::vector<std::string> lines = {
      fmt::format("comm hook {}\n  a reduction sends {:.0f} of {:.0f} bytes per rank: {}", text_,
                  after_, before_, rate(before_, after_))};
  if (is_noop_) {
    lines.emplace_back(
        "  *** GRADIENTS ARE NOT REDUCED: ranks train apart, and the model is worthless. "
        "comm.hook=noop only measures what communication costs. ***");
  }
  if (compresses_) {
    const auto whole = std::ranges::count(rows_, 0, &Row::rank);
    lines.push_back(
        fmt::format("  {} of {} parameters compressed; errors remembered per rank: {} bytes on the "
                    "device, {} on the host",
                    std::ssize(rows_) - whole, rows_.size(), on_device_, on_host_));
  }
  return lines;
}

std::string HookReport::table() const {
  std::string text = fmt::format("{:<32} {:<20} {:>5} {:>14} {:>14} {:>10}\n", "parameter", "shape",
                                 "rank", "bytes before", "bytes after", "rate");
  const auto add = [&](const Row& row) {
    text += fmt::format("{:<32} {:<20} {:>5} {:>14.0f} {:>14.0f} {:>10}\n", row.name, row.shape,
                        row.rank == 0 ? "-" : std::to_string(row.rank), row.before, row.after,
                        rate(row.before, row.after));
  };
  for (const Row& row : rows_) add(row);
  add({"all", "", 0, before_, after_});
  return text;
}

JsonRecord HookReport::record() const {
  JsonRecord record;
  if (!is_given_) return record;
  record.add("comm_hook", text_);
  record.add("comm_hook_bytes_before", std::llround(before_));
  record.add("comm_hook_bytes_after", std::llround(after_));
  record.add("comm_hook_error_bytes", on_device_ + on_host_);
  return record;
}

}  // namespace tessera::tools
