// Collects what ran on streams, by kernel: each launch states its name and its work.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "engine/stream.h"

namespace tessera::tools {

/// Every launch of one name on one stream; of one shape as well, if the log tells them apart.
struct KernelTimes {
  std::string name, stream;
  /// Of one launch: what tells shapes apart.
  double call_flops = 0;
  std::int64_t call_bytes_read = 0, call_bytes_written = 0;
  double flops = 0, nbytes = 0;  ///< sums
  std::vector<double> ms = {};   ///< of each launch

  double total_ms() const;
  /// For `num_steps` alike: the sum of each launch's fastest, which other load on the machine
  /// touches least. NaN if the steps do not launch equally often.
  double best_step_ms(std::int64_t num_steps) const;
};

class LaunchLog : public engine::LaunchListener {
 public:
  LaunchLog() = default;
  explicit LaunchLog(bool by_shape) : by_shape_(by_shape) {}

  void on_launch(const engine::LaunchRecord& record) noexcept override;
  /// Forgets what has begun, also what a GPU only tells of later.
  void clear();
  /// In the order of first launch. Throws what went wrong while launches were noted, such as
  /// std::bad_alloc.
  std::vector<KernelTimes> kernels() const;

 private:
  void note(const engine::LaunchRecord& record);

  const bool by_shape_ = false;
  mutable std::mutex mutex_;
  std::vector<KernelTimes> kernels_;
  std::int64_t since_ns_ = 0;
  std::exception_ptr failure_;
};

}  // namespace tessera::tools
