// The checksums of a run: one file for all ranks of a process, which takes its place when the run
// has ended. Of several processes their records together are that of the run. See
// tools/probe/probe_record.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/io/file.h"
#include "engine/stream.h"
#include "tools/config/train_config.h"
#include "tools/probe/probe.h"
#include "tools/probe/probe_record.h"
#include "tools/report/local_ranks.h"

namespace tessera::tools {

class RunProbe {
 public:
  /// For a `config` that asks for it, which outlives this; `options`: those in force, as a JSON
  /// object. Throws IoError
  /// naming the path when it cannot be written. A record of more than `max_nbytes` is lost, which
  /// is told at once, and by commit().
  RunProbe(const TrainConfig& config, const LocalRanks& ranks, const std::string& options,
           std::int64_t max_nbytes = kMaxProbeNbytes);
  RunProbe(const RunProbe&) = delete;
  RunProbe& operator=(const RunProbe&) = delete;

  /// Of a rank of this process, for its trainer.
  Probe& probe(int rank) { return *probes_[ranks_.index(rank)]; }

  // Of each rank, in its thread; collective where `world` is of several processes.

  /// Before start_after(): what the record says of the run, alike for all ranks; see ProbeHeader.
  void describe(const std::string& data_digest,
                const std::map<std::string, std::string>& arithmetic);
  /// Before its first step: the run goes on after step `start`.
  void start_after(std::int64_t start, comm::ProcessGroup& world, const engine::Stream& stream);
  /// After its last step.
  void end(comm::ProcessGroup& world, const engine::Stream& stream);

  // The ranks have ended.

  /// The steps that all of them ended are the record; if there are none, an older one stays. Throws
  /// IoError for one that could not be written, and InvalidArgument if the tensor whose values were
  /// asked for was not met.
  void commit();
  /// Keeps the record after an error: what there is, of the step in which it happened as well, if
  /// it can be written.
  void keep() noexcept;
  /// After commit(): a line for the terminal, where it is and how much it holds, with the records
  /// of other processes, or why it is not written.
  std::string summary() const;

 private:
  void append(const std::string& text);
  void append_header();
  void write(int rank, std::int64_t step, const std::vector<ProbePart>& parts);
  void write_end();
  std::int64_t last_step() const;
  std::int64_t num_local_parts() const;
  std::int64_t num_parts() const;  // in the records of all processes
  bool has_step() const;           // that all ranks ended

  const TrainConfig& config_;
  const LocalRanks ranks_;
  std::string path_, target_;
  engine::AtomicFile file_;
  ProbeHeader header_;
  std::vector<std::unique_ptr<Probe>> probes_;
  std::mutex mutex_;
  std::vector<std::int64_t> last_steps_;  // of each rank
  std::vector<std::int64_t> num_parts_;   // of each rank
  std::int64_t num_parts_of_all_ = 0;     // of several processes, once end() has returned
  StepRange steps_;
  std::int64_t start_ = 0;  // after which they are
  bool has_header_ = false;
  std::int64_t max_nbytes_, nbytes_ = 0;
  std::int64_t newest_step_ = 0;  // that some rank has parts of
  bool has_gone_wrong_ = false;   // what comes now is of a step that did not end
  std::string error_;             // of the first write that failed
};

/// What the record says of the run. `options`: see RunProbe.
ProbeHeader probe_header(const TrainConfig& config, int num_ranks, const std::string& options);

}  // namespace tessera::tools
