// The thread that watches all communicators of a process, and those of one group together. Private
// to comm; only where CUDA is built.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/nccl/endpoint.h"

namespace tessera::comm {

/// Polls all endpoints of a world's ranks in this process. When the world fails it aborts their
/// communicators, so that no stream and nobody who waits for one is left hanging.
class NcclWatchdog {
 public:
  explicit NcclWatchdog(std::shared_ptr<World> world);
  ~NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  void add(NcclEndpoint* endpoint);
  void remove(NcclEndpoint* endpoint);
  /// To be called when the world has failed: now rather than at the next poll.
  void abort_all() noexcept;

 private:
  void run();

  const std::shared_ptr<World> world_;
  std::mutex mutex_;  // guards endpoints_
  std::vector<NcclEndpoint*> endpoints_;
  std::atomic<std::uint32_t> closing_ = 0;
  std::thread thread_;
};

/// The endpoints of one group that this process holds. The last rank to leave ends all of them: so
/// no rank waits in a destructor for what another thread does next.
class NcclEndpoints {
 public:
  NcclEndpoints(std::shared_ptr<NcclWatchdog> watchdog,
                std::vector<std::unique_ptr<NcclEndpoint>> endpoints);
  /// Waits for what is enqueued, at most the deadline; a failed world, or one that an exception
  /// unwinds, aborts.
  ~NcclEndpoints();
  NcclEndpoints(const NcclEndpoints&) = delete;
  NcclEndpoints& operator=(const NcclEndpoints&) = delete;

  NcclEndpoint& endpoint(std::size_t i) { return *endpoints_[i]; }
  const std::shared_ptr<NcclWatchdog>& watchdog() const { return watchdog_; }

 private:
  bool finish() noexcept;  // whether all of them have ended in order

  const std::shared_ptr<NcclWatchdog> watchdog_;
  const std::vector<std::unique_ptr<NcclEndpoint>> endpoints_;
  const int num_exceptions_ = std::uncaught_exceptions();
};

}  // namespace tessera::comm
