// Where the last calls of a run's ranks go when it fails.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/flight_recorder.h"
#include "tools/report/local_ranks.h"

namespace tessera::tools {

class FlightOutput {
 public:
  /// The name in the output folder; see file_of() for that of another process than the first.
  static constexpr const char* kName = "flight.json";
  /// As a shell finds those of all processes.
  static constexpr const char* kNames = "flight*.json";

  explicit FlightOutput(const std::string& folder, const LocalRanks& ranks = {});

  const std::shared_ptr<comm::FlightRecorder>& recorder() const { return recorder_; }
  /// Removes what an earlier run left. Of the run's processes each removes its own file, as it
  /// alone knows whether that is of this run; that of rank 0 those of others.
  void remove_earlier() const;
  /// Writes the file, whole or not at all, over an earlier one of this run. A line that says where
  /// it is, or why there is none. Thread-safe.
  std::string write(std::string_view error) noexcept;

 private:
  const std::string folder_;
  const LocalRanks ranks_;
  const std::string path_, all_paths_;
  const std::shared_ptr<comm::FlightRecorder> recorder_;
  std::mutex mutex_;  // of the file
};

}  // namespace tessera::tools
