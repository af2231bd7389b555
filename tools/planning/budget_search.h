// The fastest of the ways to train that a limit of memory leaves.
//
// [Note: the search]
// What can be given up for memory has levels, of which each next one needs less and takes longer:
// gathers ahead, reductions in flight, what is kept after forward, how many blocks are recomputed,
// which part of the optimizer's state, the gradients and the parameters lies on the host. Gathers,
// reductions and resharding have few levels: all are combined. The others are fine, and time and
// memory go nearly linearly with each. So among what fits and is fastest there is one with at most
// one of them between its ends (as in a knapsack that may be filled with parts), and only those are
// looked at: the ends are corners, and along an edge between a corner that is too large and one
// that fits lies the first level that fits. Edges whose fast end is no faster than what was found
// are left out. At the end neighbours of the fastest are looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "tools/config/train_config.h"
#include "tools/planning/planner.h"

namespace tessera::tools {

/// Plans a configuration.
using PlanMost = std::function<TrainPlan(const TrainConfig&)>;

class BudgetSearch {
 public:
  /// A way to train.
  struct Found {
    TrainConfig config;
    std::int64_t nbytes;
    double step_ms;
    bool fits;  ///< the budget
  };

  /// For a model of `num_blocks`. `plan_most` plans the rank that needs most, `plan_one` a single
  /// one in less time. What is chosen with the help of `plan_one` is planned by `plan_most` as
  /// well, as another rank may need more. If `plan_one` is null, `plan_most` plans all.
  BudgetSearch(const TrainConfig& asked, std::int64_t budget_nbytes, std::int64_t num_blocks,
               PlanMost plan_most, PlanMost plan_one);

  /// What fits and is fastest of each combination that was looked at, the fastest last. Empty if
  /// nothing fits. What is asked for, if that fits.
  std::vector<Found> run();
  /// What is asked for, and what needs least of all that was looked at.
  Found asked() { return found(Levels(knobs_.size(), 0)); }
  Found least();
  std::int64_t num_looked() const { return num_looked_; }

 private:
  using Levels = std::vector<std::int64_t>;  // of each knob; 0: as asked
  struct Knob {
    std::int64_t last;  // the level that needs least
    bool is_fine;
    std::function<void(TrainConfig&, std::int64_t level)> apply;
  };
  struct Looked {
    std::int64_t nbytes;
    double step_ms;
    bool is_most = false;  // of all ranks
  };
  void add_knobs();
  void add(std::int64_t last, bool is_fine, std::function<void(TrainConfig&, std::int64_t)> apply);
  void add_offload(double OffloadConfig::*part);
  TrainConfig config_at(const Levels& at) const;
  Looked plan(const Levels& at, const PlanMost& plan);
  const Looked& look(const Levels& at);
  bool fits(const Looked& looked) const { return looked.nbytes <= budget_; }
  bool fits(const Levels& at) { return fits(look(at)); }
  Found found(const Levels& at);
  bool any_fits();
  std::vector<Levels> fast_corners() const;
  void look_along(const Levels& corner, std::size_t knob);
  void look_around(const Levels& corner);
  void look_at_all();
  void look_nearby();
  bool may_be_faster(double bound_ms) const;
  void offer(const Levels& at);

  TrainConfig asked_;
  std::int64_t budget_, num_blocks_;
  PlanMost plan_most_, plan_one_;
  std::vector<Knob> knobs_;
  std::optional<std::size_t> recompute_;  // of knobs_
  std::map<Levels, Looked> looked_;
  std::vector<Levels> fitting_;
  std::optional<double> fastest_ms_;
  std::int64_t num_looked_ = 0;
};

}  // namespace tessera::tools
