// What one training left in its log, as far as a comparison asks. What a log does not tell - as of
// an older build, or of a device that cannot know it - is absent here, and never 0.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera::tools {

/// By category, and "total".
using BytesByCategory = std::map<std::string, std::int64_t>;

/// The fields of a step's record that are compared, besides its loss, by their names in the log:
/// step_ms, exposed_comm_ms, compute_ms, optimizer_ms, data_ms, tokens_per_s, sent_bytes and
/// num_collectives (of rank 0); and overlap, the fraction of communication that was hidden, from
/// the last record of a run with a trace.
const std::vector<std::string>& metric_names();

struct RunRecord {
  std::vector<double> loss;  ///< of each step; NaN where the log says null
  /// Of each step; absent where some step does not tell. Overlap is NaN of steps without a trace.
  std::map<std::string, std::vector<double>> metrics;
  BytesByCategory peak_bytes, host_peak_bytes;  ///< of rank 0, up to the last step
  std::string params_sha256;
  std::string data_digest;             ///< see data_digest.h; empty: not told
  std::string device, cpu;             ///< of the last record; empty: not told
  std::string launch;                  ///< as Ranks::launch_str(); empty: one process
  std::string stopped_by;              ///< empty: it ran to its end
  BytesByCategory planned_peak_bytes;  ///< "planned" of the last record; empty: not told
  std::optional<std::int64_t> planned_sent_bytes = {}, planned_num_collectives = {};
};

/// `values`, one of each step, without those of the first `warmup` steps.
std::span<const double> after_warmup(const std::vector<double>& values, std::int64_t warmup);

/// Reads a log of train_transformer. Throws IoError naming path and line: unreadable, no JSON,
/// steps that are not 1, 2, 3..., a field of another type, no last record.
RunRecord read_run_record(const std::string& path);

/// The middle of some values, and where half of them lie.
struct Spread {
  double median = 0, q1 = 0, q3 = 0;
};
/// Quartiles by linear interpolation. None of no values.
std::optional<Spread> spread_of(std::vector<double> values);

}  // namespace tessera::tools
