#include "comm/nccl/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "engine/cuda_check.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;

// Sleeps short at first: most calls are done at once.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(next_ * 2, kMost);
  }

 private:
  static constexpr std::chrono::microseconds kMost{1000};
  std::chrono::microseconds next_{10};
};

constexpr std::string_view kPurposeNames[kNumPurposes] = {"gathers", "reductions"};

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library,
                                   const ncclUniqueId& id, int size, int rank, int gpu,
                                   std::string name)
    : library_(std::move(library)), name_(std::move(name)), gpu_(gpu) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t result = library_->comm_init_rank_config(&comm_, size, id, rank, &config);
  if (result == ncclSuccess || result == ncclInProgress) return;
  const std::string what = describe(result);
  if (comm_ != nullptr) (void)library_->comm_abort(std::exchange(comm_, nullptr));
  engine::fail<CommError>("[nccl] expected ncclCommInitRankConfig to succeed, got {} ({})", what,
                          name_);
}

NcclCommunicator::~NcclCommunicator() { abort(); }

void NcclCommunicator::call(std::string_view call, World& world, DeadlineClock::time_point deadline,
                            const std::function<ncclResult_t(const NcclLibrary&, ncclComm_t)>& fn) {
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) result = fn(*library_, comm_);
  }
  if (result == ncclSuccess || result == ncclInProgress) return wait(call, world, deadline);
  world.wait_for_word();
  world.check();
  engine::fail<CommError>("[nccl] expected {} to succeed, got {} ({})", call, describe(result),
                          name_);
}

void NcclCommunicator::wait(std::string_view call, World& world,
                            DeadlineClock::time_point deadline) {
  for (Backoff backoff;; backoff.sleep()) {
    const ncclResult_t result = state();
    if (world.has_failed()) world.check();
    if (result == ncclSuccess) return;
    const bool is_late = world.clock().now() >= deadline;
    if (result != ncclInProgress || is_late) {
      world.wait_for_word();
      world.check();
    }
    engine::require<CommError>(result == ncclInProgress,
                               "[nccl] expected {} to succeed, got {} ({})", call, describe(result),
                               name_);
    engine::require<CommError>(!is_late,
                               "[nccl] expected {} to be done within the deadline, got no end of "
                               "it: not all ranks take part ({})",
                               call, name_);
  }
}

std::optional<std::string> NcclCommunicator::error() {
  const ncclResult_t result = state();
  if (result == ncclSuccess || result == ncclInProgress) return std::nullopt;
  return fmt::format("{} ({})", describe(result), name_);
}

void NcclCommunicator::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  engine::on_gpu_quietly(gpu_,
                         [this] { (void)library_->comm_abort(std::exchange(comm_, nullptr)); });
}

void NcclCommunicator::begin_finish() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  engine::on_gpu_quietly(gpu_, [this] { (void)library_->comm_finalize(comm_); });
}

bool NcclCommunicator::end_finish(World& world, DeadlineClock::time_point deadline) noexcept {
  for (Backoff backoff;; backoff.sleep()) {
    const ncclResult_t result = state();
    if (result == ncclSuccess) break;
    if (result != ncclInProgress || world.has_failed() || world.clock().now() >= deadline)
      return false;
  }
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return true;
  engine::on_gpu_quietly(gpu_,
                         [this] { (void)library_->comm_destroy(std::exchange(comm_, nullptr)); });
  return true;
}

// An aborted one has succeeded: there is nothing to wait for.
ncclResult_t NcclCommunicator::state() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return ncclSuccess;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = library_->comm_get_async_error(comm_, &state);
  return result == ncclSuccess ? state : result;
}

std::string NcclCommunicator::describe(ncclResult_t result) const {
  std::string text = library_->get_error_string(result);
  const char* last = library_->get_last_error(nullptr);
  if (last != nullptr && *last != '\0') text += fmt::format(": {}", last);
  if (result == ncclInvalidUsage) {
    text += "; NCCL wants a GPU for each rank, several ranks on one GPU run with comm:threads";
  }
  return text;
}

NcclIds make_ids(const NcclLibrary& library) {
  NcclIds ids;
  for (ncclUniqueId& id : ids) {
    const ncclResult_t result = library.get_unique_id(&id);
    engine::require<CommError>(result == ncclSuccess,
                               "[nccl] expected ncclGetUniqueId to succeed, got {}",
                               library.get_error_string(result));
  }
  return ids;
}

std::vector<NcclCommunicators> join(const std::shared_ptr<const NcclLibrary>& library,
                                    const NcclIds& ids, const std::string& name, int size,
                                    const std::vector<LocalRank>& ranks, World& world) {
  const auto check = [&](ncclResult_t result, std::string_view call) {
    engine::require<CommError>(result == ncclSuccess || result == ncclInProgress,
                               "[nccl] expected {} to succeed, got {} ({})", call,
                               library->get_error_string(result), name);
  };
  std::vector<NcclCommunicators> communicators(ranks.size());
  for (std::size_t p = 0; p < kNumPurposes; ++p) {
    // In a group one thread can begin for several ranks; nothing waits before its end.
    check(library->group_start(), "ncclGroupStart");
    std::exception_ptr error;
    try {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        const engine::CurrentGpu current(ranks[i].gpu);
        communicators[i][p] = std::make_unique<NcclCommunicator>(
            library, ids[p], size, ranks[i].rank, ranks[i].gpu,
            fmt::format("rank {} of {}, cuda:{}, for {}", ranks[i].rank, name, ranks[i].gpu,
                        kPurposeNames[p]));
      }
    } catch (...) {
      error = std::current_exception();
    }
    const ncclResult_t end = library->group_end();
    if (error) std::rethrow_exception(error);
    check(end, "ncclGroupEnd");
    const auto until = world.time_limit();
    for (const NcclCommunicators& of_rank : communicators) {
      of_rank[p]->wait(fmt::format("{} ranks to join", size), world, until);
    }
  }
  return communicators;
}

}  // namespace tessera::comm
