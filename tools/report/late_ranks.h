// Which rank the others wait for, where ranks are processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/flight_recorder.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {

/// What calls of this process have waited for since this was made.
class LateRanks {
 public:
  explicit LateRanks(std::shared_ptr<const comm::FlightRecorder> flight);

  /// Ends a step. Whom its calls waited for longest, and how long in all: late_rank, late_ms; empty
  /// where they waited for nobody.
  JsonRecord step();
  std::int64_t num_steps() const { return num_steps_; }
  /// For find_late_rank().
  std::string text() const;

 private:
  const std::shared_ptr<const comm::FlightRecorder> flight_;
  const comm::FlightWaits begin_;
  comm::FlightWaits last_;
  std::int64_t num_steps_ = 0;
};

struct LateRank {
  int rank = 0;
  std::string host;
  int waiting = 0;       ///< the rank that waited longest for it
  double share = 0;      ///< of that one's calls, 0 to 1
  double ms_a_step = 0;  ///< that these waited for it

  /// "rank 0 waited for rank 3 on h2 in 61 % of its calls, 4.1 ms a step"
  std::string str() const;
  /// late_rank, late_share, late_ms.
  JsonRecord record() const;
};

/// Who is late, by the text() of each rank: nobody unless most calls of a rank waited for it, for a
/// twentieth of a step.
std::optional<LateRank> find_late_rank(std::span<const std::string> texts, std::int64_t num_steps,
                                       double step_ms);

}  // namespace tessera::tools
