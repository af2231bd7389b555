// A step as a line for people, and sizes, times and rates in units that read well.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tools/report/step_record.h"

namespace tessera::tools {

struct StepTextOptions {
  std::int64_t num_steps = 0;
  std::string items = "items";              ///< that items_per_s counts
  std::optional<double> peak_percent = {};  ///< see RunLog::set_rates()
  std::string eta = {};                     ///< time left
  std::optional<std::size_t> columns = {};  ///< that the line may take; none: any number
};

/// "step    10/500 | loss 2.3456 | ... | 123.4 ms: compute 98.2, ... | 210.3 MiB | ETA 0:30": each
/// figure with its unit, and in its column from line to line. Where that is too long, what the end
/// of the run says again is left out: what the time went to first, then the peak, the memory, the
/// learning rate and the norm.
std::string step_text(const StepRecord& record, const StepTextOptions& options);
/// The short form, for a status line.
std::string status_text(const StepRecord& record, const StepTextOptions& options);

/// "512 B", "1.5 KiB", "210.3 MiB", "12.0 GiB".
std::string nbytes_text(double nbytes);
/// "8.50 us", "12.3 ms", "102.9 s".
std::string duration_text(double ms);
/// "80 MB/s", "2.5 GB/s", "989 TFLOP/s": what is given in GFLOP/s or GB/s, with the prefix that it
/// reads best with. `unit`: "FLOP/s", "B/s".
std::string rate_text(double giga_per_s, std::string_view unit);

}  // namespace tessera::tools
