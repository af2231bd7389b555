// The functions of <nccl.h>: what they check, and how work gets on streams.
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/emulator/control.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/nccl_control.h"
#include "tests/emulator/nccl_internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
namespace {

thread_local std::string last_error;
thread_local int group_depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;

struct Queued {
  std::shared_ptr<NcclComm> comm;
  NcclArgs args;
};
thread_local std::vector<Queued> group;
thread_local std::vector<std::shared_ptr<NcclComm>> aborted_in_group;

ncclResult_t refuse(ncclResult_t result, std::string why) {
  last_error = std::move(why);
  if (group_depth > 0 && group_error == ncclSuccess) group_error = result;
  return result;
}

// Until nothing of `comm` is on a stream.
void wait_for_streams(const NcclComm& comm, std::unique_lock<std::mutex>& lock) {
  while (comm.num_outstanding > 0) {
    nccl_state().changed.wait_for(lock, std::chrono::milliseconds(1));
  }
}

int some_polls() {
  NcclState& s = nccl_state();
  s.random = s.random * 6364136223846793005u + settings().delay_seed + 1442695040888963407u;
  return static_cast<int>((s.random >> 33) % 3);
}

// --- How it gets there. All under the mutex. ---

// To be put on the stream by a poll; from then on the communicator is in progress.
void submit(const std::shared_ptr<NcclComm>& comm, const std::vector<NcclArgs>& all) {
  NcclState& s = nccl_state();
  std::function<void()> run;
  bool is_message = all[0].kind == NcclKind::kSend || all[0].kind == NcclKind::kRecv;
  if (is_message) {
    run = [comm, all] { run_messages(comm, all); };
  } else {
    run = [comm, number = comm->num_operations++, args = all[0]] {
      run_collective(comm, number, args);
    };
  }
  for (auto fault = s.faults.begin(); fault != s.faults.end(); ++fault) {
    if (fault->rank != comm->rank || --fault->nth > 0) continue;
    if (fault->error != ncclSuccess) comm->error = fault->error;
    s.faults.erase(fault);
    run = [comm] { hang(*comm); };
    break;
  }
  comm->polls = std::max(comm->polls, some_polls());
  const std::string name =
      is_message ? "ncclSend and ncclRecv" : kNcclNames[static_cast<int>(all[0].kind)];
  comm->unenqueued.emplace_back([comm, run, name, stream = all[0].stream] {
    // Counts while the stream holds it, whether it runs or is skipped on a device that failed.
    struct Outstanding {
      explicit Outstanding(std::shared_ptr<NcclComm> c) : comm(std::move(c)) {
        ++comm->num_outstanding;
      }
      ~Outstanding() {
        --comm->num_outstanding;
        nccl_state().changed.notify_all();
      }
      Outstanding(const Outstanding&) = delete;
      Outstanding& operator=(const Outstanding&) = delete;
      const std::shared_ptr<NcclComm> comm;
    };
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess ||
        capturing != cudaStreamCaptureStatusNone) {
      comm->error = ncclInvalidUsage;  // in a graph: not emulated
      return;
    }
    auto outstanding = std::make_shared<Outstanding>(comm);
    const cudaError_t status =
        enqueue(stream, name, [outstanding = std::move(outstanding), run]() mutable {
          const Unseen unseen;
          run();
          outstanding.reset();
        });
    if (status == cudaSuccess) return;
    comm->error = ncclUnhandledCudaError;
  });
}

ncclResult_t poll(NcclComm& comm) {
  if (comm.hub) {
    comm.hub->hear();
    comm.clique->error = comm.hub->error(comm.num_outstanding > 0);
  }
  if (comm.error == ncclSuccess) comm.error = comm.clique->error;
  if (comm.error != ncclSuccess && comm.unenqueued.empty()) return comm.error;
  if (!comm.joined) {
    if (!is_complete(comm)) return ncclInProgress;
    if (comm.polls-- > 0) return ncclInProgress;
    comm.joined = true;
  }
  if (!comm.unenqueued.empty()) {
    if (comm.polls-- > 0) return ncclInProgress;
    const LibraryThread thread(comm.device);  // whoever asks how far it is
    while (!comm.unenqueued.empty()) {
      comm.unenqueued.front()();
      comm.unenqueued.pop_front();
    }
  }
  if (comm.error != ncclSuccess) return comm.error;
  const bool has_work = comm.num_outstanding > 0 || owes_replies(*comm.clique);
  return comm.finalizing && has_work ? ncclInProgress : ncclSuccess;
}

}  // namespace
}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are NCCL's own names

struct ncclComm {
  std::shared_ptr<NcclComm> comm;
};

namespace tessera::cuda_emulation {
namespace {

// Null if it is none, or gone.
std::shared_ptr<NcclComm> find(ncclComm_t handle) {
  return nccl_state().live.contains(handle) ? handle->comm : nullptr;
}

ncclResult_t end_group() {
  std::vector<Queued> queued = std::exchange(group, {});
  if (const ncclResult_t error = std::exchange(group_error, ncclSuccess)) return error;
  // The messages of a communicator become one operation on their first stream.
  std::vector<std::pair<std::shared_ptr<NcclComm>, std::vector<NcclArgs>>> operations;
  for (Queued& q : queued) {
    const auto is_message = [](const NcclArgs& a) {
      return a.kind == NcclKind::kSend || a.kind == NcclKind::kRecv;
    };
    const auto same = std::ranges::find_if(operations, [&](const auto& operation) {
      return operation.first == q.comm && is_message(q.args) && is_message(operation.second[0]);
    });
    if (same != operations.end()) {
      if (same->second[0].stream != q.args.stream) {
        return refuse(ncclInvalidUsage, "emulated: a group of messages on two streams");
      }
      same->second.push_back(q.args);
    } else {
      operations.push_back({q.comm, {q.args}});
    }
  }
  for (const auto& [comm, all] : operations) submit(comm, all);
  return operations.empty() ? ncclSuccess : ncclInProgress;
}

ncclResult_t issue(ncclComm_t handle, const NcclArgs& args) {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  const std::shared_ptr<NcclComm> comm = find(handle);
  const std::string name = kNcclNames[static_cast<int>(args.kind)];
  if (!comm) return refuse(ncclInvalidArgument, name + ": no such communicator");
  const auto num_ranks = comm->clique->num_ranks;
  const bool in_group = group_depth > 0;
  if (!comm->joined || !comm->unenqueued.empty() || comm->error != ncclSuccess ||
      comm->finalizing) {
    return refuse(ncclInvalidUsage,
                  name + ": the communicator is in progress, failed or finalized");
  }
  if (nccl_size_of(args.type) == 0)
    return refuse(ncclInvalidArgument, name + ": type not emulated");
  if (args.peer < 0 || args.peer >= static_cast<int>(num_ranks)) {
    return refuse(ncclInvalidArgument, name + ": no rank " + std::to_string(args.peer));
  }
  if (device_of(args.stream) != comm->device) {
    return refuse(ncclInvalidUsage, name + ": the stream is not of the communicator's device");
  }
  const auto lies_here = [&](const void* p, std::size_t count) {
    int device = -1;
    return p == nullptr || count == 0 ||
           (is_device_memory(p, count * nccl_size_of(args.type), &device) &&
            device == comm->device);
  };
  if ((args.send == nullptr && args.recv == nullptr) ||
      !lies_here(args.send, send_count(args, num_ranks)) ||
      !lies_here(args.recv, recv_count(args, num_ranks))) {
    return refuse(ncclInvalidArgument, name + ": the memory is not of the communicator's device");
  }
  if (args.send != nullptr) {
    nccl_state().nbytes +=
        static_cast<std::int64_t>(send_count(args, num_ranks) * nccl_size_of(args.type));
  }
  group.push_back({comm, args});
  return in_group ? ncclSuccess : end_group();
}

bool is_emulated_sum(ncclDataType_t type, ncclRedOp_t op) {
  return (type == ncclFloat32 || type == ncclBfloat16) && op == ncclSum;
}

void add_fault(int rank, int nth, ncclResult_t error) {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  nccl_state().faults.push_back({rank, nth, error});
}

// Ends the handle; work on streams lets go of the rest.
void forget(ncclComm_t handle, NcclComm& comm) {
  nccl_state().live.erase(handle);
  comm.unenqueued.clear();
  if (comm.hub) comm.hub->leave();
  nccl_state().changed.notify_all();
  delete handle;
}

}  // namespace

bool is_complete(const NcclComm& comm) {
  return comm.hub ? comm.hub->is_complete() : comm.clique->members.size() == comm.clique->num_ranks;
}

ncclResult_t join_clique(std::uint64_t number, int num_ranks, int rank, int gpu,
                         std::shared_ptr<NcclComm>& comm) {
  NcclState& s = nccl_state();
  const auto found = s.cliques.find(number);
  if (found == s.cliques.end()) return ncclSystemError;
  const std::shared_ptr<NcclClique> clique = found->second;
  if (clique->num_ranks == 0) clique->num_ranks = static_cast<std::size_t>(num_ranks);
  if (clique->num_ranks != static_cast<std::size_t>(num_ranks) || clique->members.contains(rank)) {
    return ncclInvalidUsage;
  }
  comm = std::make_shared<NcclComm>();
  comm->clique = clique;
  comm->rank = rank;
  comm->polls = some_polls();
  clique->members[rank] = comm.get();
  if (!clique->gpus.insert(gpu).second) clique->error = ncclInvalidUsage;
  if (static_cast<int>(clique->members.size()) == num_ranks) s.cliques.erase(found);
  return ncclInProgress;
}

void reset_nccl() {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  nccl_state().faults.clear();
  nccl_state().version = NCCL_VERSION_CODE;
  nccl_state().num_aborted = 0;
  nccl_state().nbytes = 0;
  nccl_state().ignores_losses = false;
}
void ignore_lost_processes() {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  nccl_state().ignores_losses = true;
}
void set_nccl_version(int version) {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  nccl_state().version = version;
}
void fail_nccl(int rank, int nth, ncclResult_t error) { add_fault(rank, nth, error); }
void silence_nccl(int rank, int nth) { add_fault(rank, nth, ncclSuccess); }
int live_communicators() {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  return static_cast<int>(nccl_state().live.size());
}
int aborted_communicators() {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  return nccl_state().num_aborted;
}
std::int64_t nccl_nbytes() {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  return nccl_state().nbytes;
}

}  // namespace tessera::cuda_emulation

ncclResult_t ncclGetVersion(int* version) {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  *version = nccl_state().version;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, &nccl_state().next_id, sizeof(nccl_state().next_id));
  own_hub_name().copy(id->internal + sizeof(nccl_state().next_id), 100);
  nccl_state().cliques[nccl_state().next_id++] = std::make_shared<NcclClique>();
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return ncclUnhandledCudaError;
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  NcclState& s = nccl_state();
  if (config == nullptr || config->magic != 0xcafebeef || config->blocking != 0) {
    return refuse(ncclInvalidArgument, "emulated: only with a config of blocking = 0");
  }
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return refuse(ncclInvalidArgument, "no such rank");
  }
  std::uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof(number));
  const std::string hub(id.internal + sizeof(number));
  const int gpu = settings().host * 1000 + device;  // more than a host has
  std::shared_ptr<NcclComm> comm;
  if (hub == own_hub_name()) {
    const ncclResult_t result = join_clique(number, num_ranks, rank, gpu, comm);
    if (result != ncclInProgress) {
      return refuse(result, "the ranks of a communicator do not fit together");
    }
    if (comm->clique->error != ncclSuccess) last_error = "Duplicate GPU detected";
  } else {
    comm = std::make_shared<NcclComm>();
    comm->clique = std::make_shared<NcclClique>();
    comm->clique->num_ranks = static_cast<std::size_t>(num_ranks);
    comm->rank = rank;
    comm->polls = some_polls();
    comm->hub = NcclHub::join(hub, number, num_ranks, rank, gpu);
    if (!comm->hub) return refuse(ncclSystemError, "nobody is where the unique id was made");
  }
  comm->device = device;
  *out = new ncclComm{std::move(comm)};
  s.live.insert(*out);
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  const std::shared_ptr<NcclComm> comm = find(handle);
  if (!comm) return refuse(ncclInvalidArgument, "ncclCommGetAsyncError: no such communicator");
  *result = poll(*comm);
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  const Unseen unseen;
  const std::lock_guard lock(nccl_state().mutex);
  const std::shared_ptr<NcclComm> comm = find(handle);
  if (!comm || comm->finalizing || !comm->joined || !comm->unenqueued.empty()) {
    return refuse(ncclInvalidArgument, "ncclCommFinalize: no communicator that is ready");
  }
  comm->finalizing = true;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  const Unseen unseen;
  std::unique_lock lock(nccl_state().mutex);
  const std::shared_ptr<NcclComm> comm = find(handle);
  if (!comm) return refuse(ncclInvalidArgument, "ncclCommDestroy: no such communicator");
  wait_for_streams(*comm, lock);
  forget(handle, *comm);
  return ncclSuccess;
}

// As the real one, it waits until the streams are past what was enqueued: outside a group here, so
// that one aborted after the other hangs if work of the second holds up a stream of the first.
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  const Unseen unseen;
  std::unique_lock lock(nccl_state().mutex);
  const std::shared_ptr<NcclComm> comm = find(handle);
  if (!comm) return refuse(ncclInvalidArgument, "ncclCommAbort: no such communicator");
  comm->aborted = true;
  ++nccl_state().num_aborted;
  forget(handle, *comm);
  if (group_depth > 0) {
    aborted_in_group.push_back(comm);
  } else {
    wait_for_streams(*comm, lock);
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group_depth > 0) return ncclSuccess;
  const Unseen unseen;
  std::unique_lock lock(nccl_state().mutex);
  const ncclResult_t result = end_group();
  for (const auto& comm : std::exchange(aborted_in_group, {})) wait_for_streams(*comm, lock);
  return result;
}

ncclResult_t ncclAllGather(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {NcclKind::kAllGather, static_cast<const std::byte*>(send),
                      static_cast<std::byte*>(recv), count, type, 0, stream});
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  if (!is_emulated_sum(type, op)) return ncclInvalidArgument;
  return issue(comm, {NcclKind::kReduceScatter, static_cast<const std::byte*>(send),
                      static_cast<std::byte*>(recv), count, type, 0, stream});
}

ncclResult_t ncclAllReduce(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  if (!is_emulated_sum(type, op)) return ncclInvalidArgument;
  return issue(comm, {NcclKind::kAllReduce, static_cast<const std::byte*>(send),
                      static_cast<std::byte*>(recv), count, type, 0, stream});
}

ncclResult_t ncclBroadcast(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {NcclKind::kBroadcast, static_cast<const std::byte*>(send),
                      static_cast<std::byte*>(recv), count, type, root, stream});
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {NcclKind::kSend, static_cast<const std::byte*>(send), nullptr, count, type,
                      peer, stream});
}

ncclResult_t ncclRecv(void* recv, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue(
      comm, {NcclKind::kRecv, nullptr, static_cast<std::byte*>(recv), count, type, peer, stream});
}
