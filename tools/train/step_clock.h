// Divides the time of a step among its parts, by the stream that computes it: on the CPU that is
// the time of its thread, on a GPU the GPU's own, from events that nobody waits for.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/stream.h"

namespace tessera::tools {

/// See [Note: the parts of a step] in step_record.h.
enum class StepPart { kData, kCompute, kOptimizer, kExposed, kOther };

class StepClock {
 public:
  using Time = std::shared_ptr<const engine::StreamTime>;
  struct Times {
    double step_ms = 0, data_ms = 0, compute_ms = 0, exposed_comm_ms = 0, optimizer_ms = 0;
  };

  /// The step starts after all that `compute` was given.
  explicit StepClock(engine::Stream compute)
      : compute_(std::move(compute)), start_(compute_.time()) {}

  /// What `compute` was given since the last call, or the start, was `part`. On a GPU this records
  /// one event.
  void lap(StepPart part) { laps_.emplace_back(part, compute_.time()); }
  /// Where the last lap ended.
  Time end() const { return laps_.empty() ? start_ : laps_.back().second; }

  /// Once the GPU is known to have passed the last lap. `previous`: where the step before ended, if
  /// this one followed at once, as then what lies between counts as other time of this one; null:
  /// it did not. But for data, a lap's time is what waits for collectives have left of it.
  Times times(const Time& previous = nullptr) const {
    static_cast<void>(compute_.blocked_ns());  // takes up what is past
    std::array<std::int64_t, 5> own_ns = {};
    std::int64_t blocked_ns = 0;
    const engine::StreamTime* last = start_.get();
    for (const auto& [part, time] : laps_) {
      engine::require(time->is_known, "[train] expected a step that is done, got one at work");
      const std::int64_t elapsed_ns = time->ns - last->ns;
      const bool is_data = part == StepPart::kData;
      const std::int64_t of_lap =
          is_data ? 0
                  : std::clamp<std::int64_t>(time->blocked_ns - last->blocked_ns, 0, elapsed_ns);
      own_ns[static_cast<std::size_t>(part)] += elapsed_ns - of_lap;
      blocked_ns += of_lap;
      last = time.get();
    }
    const auto ms = [](std::int64_t ns) { return static_cast<double>(ns) * 1e-6; };
    const auto of = [&](StepPart part) { return ms(own_ns[static_cast<std::size_t>(part)]); };
    return {.step_ms = ms(last->ns - (previous ? previous : start_)->ns),
            .data_ms = of(StepPart::kData),
            .compute_ms = of(StepPart::kCompute),
            .exposed_comm_ms = of(StepPart::kExposed) + ms(blocked_ns),
            .optimizer_ms = of(StepPart::kOptimizer)};
  }

 private:
  engine::Stream compute_;
  Time start_;
  std::vector<std::pair<StepPart, Time>> laps_;
};

}  // namespace tessera::tools
