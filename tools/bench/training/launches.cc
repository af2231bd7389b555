#include "tools/bench/training/launches.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>

namespace tessera::tools {

double KernelTimes::total_ms() const { return std::accumulate(ms.begin(), ms.end(), 0.0); }

double KernelTimes::best_step_ms(std::int64_t num_steps) const {
  const auto steps = static_cast<std::size_t>(num_steps);
  if (ms.size() % steps != 0) return std::numeric_limits<double>::quiet_NaN();
  const std::size_t calls = ms.size() / steps;
  double sum = 0;
  for (std::size_t call = 0; call < calls; ++call) {
    double best = ms[call];
    for (std::size_t i = call; i < ms.size(); i += calls) best = std::min(best, ms[i]);
    sum += best;
  }
  return sum;
}

void LaunchLog::on_launch(const engine::LaunchRecord& record) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    note(record);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void LaunchLog::note(const engine::LaunchRecord& record) {
  if (record.begin_ns < since_ns_) return;
  const engine::Work& work = record.work;
  auto it = std::find_if(kernels_.begin(), kernels_.end(), [&](const KernelTimes& k) {
    return k.name == work.name && k.stream == record.stream &&
           (!by_shape_ || (k.call_flops == work.flops && k.call_bytes_read == work.bytes_read &&
                           k.call_bytes_written == work.bytes_written));
  });
  if (it == kernels_.end()) {
    kernels_.push_back({.name = std::string(work.name),
                        .stream = record.stream,
                        .call_flops = work.flops,
                        .call_bytes_read = work.bytes_read,
                        .call_bytes_written = work.bytes_written});
    it = kernels_.end() - 1;
  }
  it->flops += work.flops;
  it->nbytes += static_cast<double>(work.bytes_read + work.bytes_written);
  it->ms.push_back(static_cast<double>(record.end_ns - record.begin_ns) * 1e-6);
}

void LaunchLog::clear() {
  const std::lock_guard lock(mutex_);
  kernels_.clear();
  since_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(
                  std::chrono::steady_clock::now().time_since_epoch())
                  .count();
}

std::vector<KernelTimes> LaunchLog::kernels() const {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  return kernels_;
}

}  // namespace tessera::tools
