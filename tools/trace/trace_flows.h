// Which launch needs what another one brought: from the order in which work is launched alone, as
// that says what was waited for.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/stream.h"
#include "tools/trace/trace_events.h"

namespace tessera::tools {

/// Where a launch stands in a trace, once it has been told.
struct LaunchPoint {
  bool is_told = false;
  TraceThread thread = {};
  std::int64_t begin_ns = 0, end_ns = 0;
};

/// Not thread-safe.
class TraceFlows {
 public:
  struct Flow {
    std::string_view name;  ///< "gathered" or "gradient"
    std::shared_ptr<const LaunchPoint> from, to;
  };

  /// Blocks that are gathered and reduced together. Without any, each block is a unit.
  void add_unit(const std::string& unit, const std::vector<std::string>& blocks);
  std::string unit_of_block(std::string_view block) const;
  /// Of the label of a collective, such as "h.0 forward", or of an update, "h.0". Empty: none.
  std::string unit_of_label(std::string_view label) const;

  /// Work that is launched, in order. `computes`: with what was gathered. Who hears of the launch
  /// fills in what this returns; null: it is no part of a flow.
  std::shared_ptr<LaunchPoint> enqueue(const engine::LaunchRequest& request, bool computes);
  /// Forgets gathers that nobody has used by the end of the next step.
  void end_step();
  /// Flows whose two ends have been told, each once.
  std::vector<Flow> take_told();

 private:
  struct Gather {
    std::shared_ptr<LaunchPoint> point;
    bool is_old = false;  // of an earlier step
  };

  std::map<std::string, std::string, std::less<>> unit_of_block_;
  std::set<std::string, std::less<>> units_;
  std::map<std::string, std::vector<Gather>> gathers_;                // not used yet
  std::map<std::string, std::shared_ptr<LaunchPoint>> last_compute_;  // by unit
  std::vector<Flow> flows_;
};

}  // namespace tessera::tools
