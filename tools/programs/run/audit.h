// Whether training does what its plan says: bytes sent, collectives, and peaks of memory by
// category, step by step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/planning/plan_report.h"
#include "tools/planning/planner.h"
#include "tools/report/local_ranks.h"
#include "tools/report/step_record.h"

namespace tessera::tools {

class Audit {
 public:
  /// `val_every`: as in LogConfig.
  Audit(TrainPlan plan, const PlanTarget& target, std::int64_t val_every);

  const TrainPlan& plan() const { return plan_; }
  /// The rank that it is of: all of them are audited, each against a plan of its own.
  int rank() const { return rank_; }
  bool differs() const { return first_wrong_ > 0; }
  /// How many steps were compared.
  std::int64_t num_steps() const { return num_steps_; }
  /// The run goes on after that step.
  void start_after(std::int64_t step) { start_ = step; }
  /// Each step, in order, of that rank. A step after a validation is left out: units that were
  /// gathered ahead for it are gathered again. So is one that was made again if it is the first of
  /// the run, or did not come to the same.
  void add(const StepRecord& step);
  /// Planned and measured figures, of the last step that was compared. The workspace of a GPU's
  /// products is planned as the most that it may be, and norms on their way from it to the host are
  /// more or fewer; all else must be equal.
  std::vector<std::string> lines() const;
  /// The gathers of units that computation waits for in the plan, those with most first, or that
  /// there are none; empty if the plan gathers nothing.
  std::string gathers_line() const;
  /// Throws InvalidArgument with the lines and the first step that differs.
  void check() const;

 private:
  struct Row {
    std::string what = {};
    std::int64_t planned = 0, measured = 0;
    bool is_bound = false;
    std::int64_t slack = 0;
    bool is_as_planned() const {
      return measured <= planned + slack && (is_bound || measured >= planned - slack);
    }
  };
  std::vector<Row> rows_of(const StepRecord& step) const;

  TrainPlan plan_;
  int rank_;
  bool on_gpus_;
  std::int64_t start_ = 0;
  std::int64_t val_every_;
  std::int64_t num_steps_ = 0, first_wrong_ = 0;  // steps from 1; 0: none
  bool was_skipped_ = false;                      // the update of the last step
  std::vector<Row> rows_;                         // of the first wrong step, or the last
};

/// One for each rank of a process.
class Audits {
 public:
  explicit Audits(const LocalRanks& ranks)
      : ranks_(ranks), audits_(static_cast<std::size_t>(ranks.count)) {}

  /// Adds the audit of a rank, which calls this in its own thread.
  Audit& add(Audit audit);

  // All ranks have come.

  /// The audit of the first rank.
  const Audit& first() const { return *audits_.front(); }
  /// The first audit that differs, or that of the first rank.
  const Audit& shown() const;
  /// The lines of shown(); the last but one is that of gathers, and the last says how many ranks
  /// are so.
  std::vector<std::string> lines() const;

 private:
  LocalRanks ranks_;
  std::vector<std::unique_ptr<Audit>> audits_;  // of each
};

}  // namespace tessera::tools
