// What a rank did on its comm stream, as text.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/stream.h"

namespace tessera::testing {

/// Collectives of the comm stream, as "all_gather h.0 forward". Poisoning is left out.
class CollectiveLog : public engine::LaunchListener {
 public:
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    if (record.work.name == "poison") return;
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::string(record.work.name) + " " + record.work.detail);
  }
  /// The lines since the last call.
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(lines_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace tessera::testing
