// What a probe records of a run, one JSON line for each part of a tensor:
//
//   {"probe":1,"ranks":2,"accum":1,"batch":8,"first_step":1,"accum_comm":"every","options":{...},
//    "data_digest":"9,000 tokens, 9f...","arithmetic":{"device":"cpu","cpu":"AMD EPYC",...}}
//   {"step":1,"micro_batch":1,"phase":"gradient","tensor":"h.0.ln_1.weight","visit":1,"unit":"h.0",
//    "rank":0,"order":17,"shape":[128],"begin":0,"dtype":"f32","hash":"9f...","numel":128,...}
//   {"end":true,"last_step":20,"num_parts":1234}
//
// If the run went wrong within a step, the last line has "unfinished_step":21 as well: the record
// holds what ranks had computed of it.
//
// Where the ranks are several processes each writes those of its own to a process_file(). Its first
// line has "first_rank":2,"local_ranks":2,"run":"9f..." as well: one `run` in all files of a run,
// which read_probe_run() reads as one record.
//
// A record without "data_digest" or "arithmetic" does not say which its run had: older ones do not,
// nor does one of a run that failed before its first step.
//
// An infinity is "inf" or "-inf", what is not a number is null. Order of lines says nothing. A part
// that was asked for is followed by its values.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor.h"
#include "tools/probe/checksum.h"

namespace tessera::tools {

/// In the order in which a step does them, the first five for each micro-batch.
enum class ProbePhase {
  kGatheredForward,   ///< parameters as forward computes with them
  kOutput,            ///< of a region
  kOutputGradient,    ///< of the same, before the region's backward
  kGatheredBackward,  ///< parameters as backward computes with them
  kGradient,          ///< of a parameter, before it is reduced
  kReduced,           ///< the sum of gradients over ranks and micro-steps
  kUpdated,           ///< a master parameter after the update
  kState,             ///< of the optimizer, after the update
};
/// "gathered_forward": for files.
std::string_view name_of(ProbePhase phase);
/// "gathered parameter (forward)": for people.
std::string_view title_of(ProbePhase phase);

/// A tensor at a moment of a run, the same whatever the ranks and the strategy.
struct ProbeKey {
  std::int64_t step = 0;         ///< from 1
  std::int64_t micro_batch = 0;  ///< of all ranks, from 1; 0: of the whole step
  ProbePhase phase = ProbePhase::kGatheredForward;
  std::string tensor = {};  ///< "h.0.ln_1.weight", "h.0.output", "exp_avg of h.0.ln_1.weight"
  std::int64_t visit = 1;   ///< of the block in that micro-batch

  friend auto operator<=>(const ProbeKey&, const ProbeKey&) = default;
};

/// What one rank holds of it.
struct ProbePart {
  ProbeKey key;
  std::string unit;  ///< or block, of an output
  int rank = 0;
  std::int64_t order = 0;  ///< among those of the micro-batch, or of the phase; same on all ranks
  std::vector<std::int64_t> shape;  ///< of the whole
  std::int64_t begin = 0;           ///< of this part in the whole
  std::string dtype;                ///< "f32"
  Checksum checksum = {};
  std::vector<float> values = {};  ///< if asked for
};

struct ProbeHeader {
  int ranks = 1;
  int first_rank = 0, local_ranks = ranks;  ///< those that this record is of
  std::string run = {};                     ///< of processes: equal in all records of one run
  std::int64_t accum = 1, batch = 1, first_step = 1;
  bool reduces_last = false;  ///< of several micro-steps only the last reduces
  std::map<std::string, std::string> options = {};  ///< in force, as JSON literals
  std::string data_digest = {};                     ///< see data_digest.h; empty: not told
  /// See arithmetic.h: name to JSON literal; empty: not told.
  std::map<std::string, std::string> arithmetic = {};
};

/// One run, as its file tells it.
struct ProbeRun {
  std::string path;
  ProbeHeader header;
  std::int64_t last_step = 0;  ///< that all ranks ended, or that the run went wrong in
  bool is_unfinished = false;  ///< the latter: ranks have parts of it, maybe not all
  std::vector<ProbePart> parts;
};

// Each is whole lines.
std::string header_text(const ProbeHeader& header);
std::string part_text(const ProbePart& part);
/// `unfinished_step`: last_step + 1 if some rank has parts of it; 0: none.
std::string end_text(std::int64_t last_step, std::int64_t num_parts,
                     std::int64_t unfinished_step = 0);

/// A longer one is neither written nor read.
inline constexpr std::int64_t kMaxProbeNbytes = std::int64_t{4} << 30;

/// Of several processes the records of all, `path` being that of rank 0's. Throws IoError naming
/// path and line: not readable, no record, cut short, values that cannot be; a process's record
/// that is missing, or of another run.
ProbeRun read_probe_run(const std::string& path);

/// "gradient:3:1:h.0.ln_1.weight": phase, micro-batch, visit and tensor, of any step. Throws
/// InvalidArgument.
std::string target_text(const ProbeKey& key);
ProbeKey parse_target(std::string_view text);

}  // namespace tessera::tools
