// The folder of a comparison:
//
//   compare.json, report.html
//   runs/NAME/configuration.toml           all options of this configuration
//   runs/NAME/round-1/log.jsonl, config.toml, console.txt
//   runs/NAME/round-1/done.json            it ran to its end: by which program, with which data
//                                          and arithmetic
//
// One comparison alone is in a folder. Going on (--resume) demands that what is there is of the
// same configurations and program, so that nothing is mixed; there may be more configurations or
// rounds than before. A training whose data or arithmetic have changed since is made again, and so
// is one whose log cannot be read.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "engine/io/file.h"
#include "tools/compare/comparison/run_record.h"
#include "tools/compare/request/request.h"
#include "tools/compare/training_identity.h"

namespace tessera::tools {

class ComparisonFolder {
 public:
  /// Makes the folder, locks it and writes down every configuration; nothing of it if it throws
  /// InvalidArgument: an input that would be replaced, a folder with a comparison and no `resume`,
  /// other configurations in it, or trainings by another program. IoError: a folder, report or
  /// program that cannot be, or data that cannot be read.
  explicit ComparisonFolder(const Request& request);

  const std::string& path() const { return path_; }
  std::string json_path() const { return path_ + "/compare.json"; }
  const std::string& report_path() const { return report_path_; }
  const std::string& trainer() const { return trainer_; }

  std::string configuration_path(const Configuration& c) const;
  /// `round` from 1.
  std::string round_path(const Configuration& c, std::int64_t round) const;

  /// Of all trainings, so that those on GPUs multiply matrices alike.
  std::string gemm_algorithms_path() const { return path_ + "/gemm_algorithms.txt"; }

  /// Why a training that has run to its end must be made again: its data or its arithmetic are
  /// not those of one that starts now. Empty: it need not, or has not run to its end.
  std::string outdated(const Configuration& c, std::int64_t round) const;
  /// Before it is made again: it has not run to its end any more. Throws IoError.
  void discard(const Configuration& c, std::int64_t round) const;
  /// What a finished training left; none if it has not run to its end. Throws IoError for a log
  /// that cannot be read although it has.
  std::optional<RunRecord> finished(const Configuration& c, std::int64_t round) const;
  /// Marks a training as finished if its log says that it was: all steps, by itself. What it has
  /// left then; else none.
  std::optional<RunRecord> finish(const Configuration& c, std::int64_t round) const;

 private:
  void check_inputs(const Request& request) const;
  void check_same(const Request& request) const;
  void write_configurations(const Request& request) const;
  void identify(const Request& request, bool is_new);

  std::string path_, report_path_, trainer_, trainer_sha256_;
  std::map<std::string, TrainingIdentity> identities_;  // by name, of trainings that start now
  engine::FileDescriptor lock_;
};

/// For a folder that one program alone may write to at a time, as long as the descriptor is open.
/// Throws IoError naming it when another does, or nobody can.
engine::FileDescriptor lock_folder(const std::string& folder);

/// Writes `text` to `path`, whole or not at all. Throws IoError.
void write_file(const std::string& path, const std::string& text);

}  // namespace tessera::tools
