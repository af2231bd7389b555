// What a run was like, told at its end: medians of its steps, what they spent their time on, and
// what may make the next one faster.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/memory.h"
#include "tools/io/jsonl.h"
#include "tools/report/step_record.h"

namespace tessera::tools {

class RunSummary {
 public:
  void add(const StepRecord& record, std::optional<double> peak_percent);
  /// `planned`: what the plan says of a step that was added, without values. Then figures() have it
  /// with what was measured.
  void add_plan(const std::function<const StepRecord&(std::int64_t step)>& planned);

  /// Milliseconds, or another figure of each step.
  struct Spread {
    double median = 0, p10 = 0, p90 = 0;  ///< a tenth of the steps are below p10, a tenth above p90
  };
  struct Part {
    std::string_view name;  ///< compute, exposed comm, optimizer, data, other
    double share = 0;       ///< of the time of all steps, 0 to 1
  };
  /// Of rank 0.
  struct Bytes {
    std::int64_t peak_nbytes = 0;                       ///< on its device, up to the last step
    std::optional<std::int64_t> host_peak_nbytes = {};  ///< where something is offloaded
    std::int64_t sent_nbytes = 0;                       ///< median
  };
  /// Over the steps that were added, after the warm-up: after a tenth of them, at most 10, at
  /// least one; of a single step, that one. At most the last 10,000.
  struct Figures {
    std::int64_t num_steps = 0, num_warmup = 0;  ///< that count, that do not
    std::int64_t num_skipped = 0;                ///< updates, of all steps
    Spread step_ms, items_per_s;
    std::optional<double> peak_percent = {};  ///< median
    std::vector<Part> parts = {};             ///< what is known; of graphs waits alone
    engine::MemoryStats memory = {};          ///< of the last step, whose peaks are the run's
    Bytes measured = {};
    std::optional<Bytes> planned = {};  ///< nothing without a plan
    double share(std::string_view part) const;
  };
  /// Nothing before the first step.
  std::optional<Figures> figures() const;

  /// A line each: label and text. `items`: what items_per_s counts.
  static std::vector<std::pair<std::string, std::string>> rows(const Figures& figures,
                                                               std::string_view items);
  /// The figures as a record for the log.
  static JsonRecord record(const Figures& figures, std::string_view items);

 private:
  struct Sample {
    std::int64_t step;
    double step_ms, items_per_s;
    std::int64_t sent_nbytes;
    std::array<std::optional<double>, 5> parts_ms;
    std::optional<double> peak_percent;
  };
  static constexpr std::size_t kMaxSamples = 10'000;

  std::int64_t num_warmup() const;
  std::int64_t num_left_out() const;  // of samples_, the first ones

  std::deque<Sample> samples_;  // the last of num_steps_
  std::int64_t num_steps_ = 0;
  std::int64_t num_skipped_ = 0;
  engine::MemoryStats memory_;
  Bytes measured_;  // but for sent_nbytes
  std::optional<Bytes> planned_;
};

}  // namespace tessera::tools
