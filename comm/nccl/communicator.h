// An ncclComm_t that any thread may poll or abort while its rank uses it. Private to comm; only
// where CUDA is built.
#pragma once

#include <nccl.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl/library.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// [Note: non-blocking NCCL] Communicators are made with blocking = 0: no call of NCCL waits for
/// another rank. It answers ncclInProgress, and until ncclCommGetAsyncError says ncclSuccess the
/// communicator takes no other call and nothing may have been enqueued yet; so each call here waits
/// for that, within the deadline and only as long as the world has not failed.
class NcclCommunicator {
 public:
  /// Begins to join `size` ranks; ready() tells when it has. `name` is for messages. `gpu` must be
  /// the calling thread's current one. Throws CommError.
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, const ncclUniqueId& id, int size,
                   int rank, int gpu, std::string name);
  /// Aborts what finish() did not end.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Calls `fn(library, comm)` and waits until the call is done: what it enqueues is on its stream.
  /// Throws CommError with `call` if it fails, is not done by `deadline`, or the world has failed.
  void call(std::string_view call, World& world, DeadlineClock::time_point deadline,
            const std::function<ncclResult_t(const NcclLibrary&, ncclComm_t)>& fn);
  /// Waits as call() does, for an earlier call or the constructor.
  void wait(std::string_view call, World& world, DeadlineClock::time_point deadline);

  /// What went wrong meanwhile, if anything did. Never blocks.
  std::optional<std::string> error();
  /// Ends everything that is pending on streams, without its result. Idempotent. See AbortTogether.
  void abort() noexcept;
  /// Orderly end: begin on all communicators of a process, then end each. That is false if not all
  /// was done by `deadline`, or the world fails meanwhile.
  void begin_finish() noexcept;
  bool end_finish(World& world, DeadlineClock::time_point deadline) noexcept;

  const std::string& name() const { return name_; }
  const NcclLibrary& library() const { return *library_; }

 private:
  ncclResult_t state();
  std::string describe(ncclResult_t result) const;

  const std::shared_ptr<const NcclLibrary> library_;
  const std::string name_;
  const int gpu_;  // NCCL leaves a thread with the GPU that it had
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;  // null: aborted or finished
};

/// [Note: aborting together] ncclCommAbort tells the communicator's kernels to end, then waits
/// until its streams are past them. A stream may be held up before that by a kernel of another
/// communicator, which nobody has told: so all that a process has are aborted in one group of NCCL,
/// which tells them all before it waits. That is what happens to those aborted by this thread in
/// the life of this object, when it ends.
class AbortTogether {
 public:
  explicit AbortTogether(const NcclLibrary& library) : library_(library) {
    (void)library_.group_start();
  }
  ~AbortTogether() { (void)library_.group_end(); }
  AbortTogether(const AbortTogether&) = delete;
  AbortTogether& operator=(const AbortTogether&) = delete;

 private:
  const NcclLibrary& library_;
};

/// One rank's communicators of a group: NCCL runs the work of one communicator in the order in
/// which it is enqueued, so gathers and reductions that are to overlap need one each.
enum class Purpose { kGather, kReduce };
inline constexpr int kNumPurposes = 2;

using NcclIds = std::array<ncclUniqueId, kNumPurposes>;
NcclIds make_ids(const NcclLibrary& library);

/// A rank that this process holds.
struct LocalRank {
  int rank = 0;
  int gpu = 0;
};
using NcclCommunicators = std::array<std::unique_ptr<NcclCommunicator>, kNumPurposes>;

/// The communicators of `ranks` in the group `name` of `size` ranks. Throws CommError if not all
/// ranks of the group have joined within the deadline, or NCCL refuses.
std::vector<NcclCommunicators> join(const std::shared_ptr<const NcclLibrary>& library,
                                    const NcclIds& ids, const std::string& name, int size,
                                    const std::vector<LocalRank>& ranks, World& world);

}  // namespace tessera::comm
