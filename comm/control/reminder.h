// When a person is told that something lasts.
#pragma once

#include <algorithm>
#include <chrono>

namespace tessera::comm::control {

/// After a tenth of its deadline, at most 5 s, and again whenever it has lasted twice as long.
class Reminder {
 public:
  explicit Reminder(std::chrono::milliseconds deadline)
      : next_(std::clamp<std::chrono::milliseconds>(deadline / 10, std::chrono::milliseconds(1),
                                                    std::chrono::seconds(5))) {}

  /// True once each time.
  bool is_due() {
    const auto lasted = std::chrono::steady_clock::now() - since_;
    if (lasted < next_) return false;
    while (next_ <= lasted) next_ *= 2;
    return true;
  }

 private:
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  std::chrono::milliseconds next_;
};

}  // namespace tessera::comm::control
