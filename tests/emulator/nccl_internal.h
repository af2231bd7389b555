// The parts of the emulated NCCL among themselves.
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::cuda_emulation {

enum class NcclKind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kSend, kRecv };
inline constexpr const char* kNcclNames[] = {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce",
                                             "ncclBroadcast", "ncclSend",          "ncclRecv"};

struct NcclArgs {
  NcclKind kind;
  const std::byte* send;
  std::byte* recv;
  std::size_t count;  // as given to the call
  ncclDataType_t type;
  int peer;  // or root
  cudaStream_t stream;
};

inline std::size_t nccl_size_of(ncclDataType_t type) {
  return type == ncclUint8      ? 1
         : type == ncclBfloat16 ? 2
         : type == ncclFloat32  ? 4
                                : 0;  // what the engine uses
}

// One collective among all ranks. Edges: `arrived` from each rank to who carries it out, `done`
// from there to all.
struct NcclMeeting {
  std::vector<NcclArgs> args;
  int num_arrived = 0;
  bool broken = false;  // a rank left it: it never ends
  bool done = false;
  char arrived_edge = 0, done_edge = 0;
};

struct NcclMessage {
  NcclArgs send;
  bool taken = false;
  char sent_edge = 0, taken_edge = 0;
};

struct NcclComm;
struct NcclClique {
  std::size_t num_ranks = 0;
  std::map<int, NcclComm*> members;  // by rank, all that have joined
  std::set<int> gpus;
  // See nccl_guests.cc.
  bool has_guests = false;
  int num_guest_operations = 0;
  std::list<const std::function<bool()>*> guest_waits;  // what these wait for, one each
  ncclResult_t error = ncclSuccess;
  std::map<std::uint64_t, std::shared_ptr<NcclMeeting>> meetings;
  // By sender and receiver.
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<NcclMessage>>> mail;
};

class NcclHub;

// Outlives its handle: work on streams refers to it.
struct NcclComm {
  std::shared_ptr<NcclClique> clique;
  std::shared_ptr<NcclHub> hub;  // null: the clique is of this process
  int rank = 0;
  int device = 0;
  ncclResult_t error = ncclSuccess;
  bool is_guest = false;  // of a rank elsewhere
  bool joined = false;
  bool aborted = false;
  bool finalizing = false;
  int polls = 0;                                 // that still answer ncclInProgress
  std::deque<std::function<void()>> unenqueued;  // by a poll
  std::uint64_t num_operations = 0;
  std::atomic<int> num_outstanding = 0;  // on streams
};

struct NcclFault {
  int rank, nth;
  ncclResult_t error;
};

struct NcclState {
  std::mutex mutex;  // guards everything here, for good: threads of nccl_guests.cc never end
  std::condition_variable changed;
  std::map<std::uint64_t, std::shared_ptr<NcclClique>> cliques;  // by unique id
  std::set<ncclComm_t> live;
  std::vector<NcclFault> faults;
  std::uint64_t next_id = 1;
  std::uint64_t random = 1;
  int version = NCCL_VERSION_CODE;
  int num_aborted = 0;
  std::int64_t nbytes = 0;  // see nccl_nbytes()
  bool ignores_losses = false;
};

NcclState& nccl_state();

/// Elements that a rank brings, and gets.
inline std::size_t send_count(const NcclArgs& a, std::size_t num_ranks) {
  return a.kind == NcclKind::kReduceScatter ? a.count * num_ranks : a.count;
}
inline std::size_t recv_count(const NcclArgs& a, std::size_t num_ranks) {
  return a.kind == NcclKind::kAllGather ? a.count * num_ranks : a.count;
}

/// A communicator of the clique with that number, without its device. `gpu`: a number that no other
/// GPU of any host has. ncclInProgress, or why not. Under the mutex.
ncclResult_t join_clique(std::uint64_t number, int num_ranks, int rank, int gpu,
                         std::shared_ptr<NcclComm>& comm);
/// Whether all ranks of its clique have joined.
bool is_complete(const NcclComm& comm);

// --- Ranks in other processes (nccl_guests.cc; nccl_hub.cc).

/// Where this process can be reached by whoever has a unique id of it.
const std::string& own_hub_name();

/// The process that has the clique of a communicator, as the process of that communicator sees it.
/// Members but run() under the mutex.
class NcclHub {
 public:
  /// Begins to join. Null: nobody is there.
  static std::shared_ptr<NcclHub> join(const std::string& name, std::uint64_t clique, int num_ranks,
                                       int rank, int gpu);
  NcclHub(std::string name, std::uint64_t clique, int rank, int link);
  ~NcclHub();
  NcclHub(const NcclHub&) = delete;
  NcclHub& operator=(const NcclHub&) = delete;

  /// Takes what it has said meanwhile. Does not wait.
  void hear();
  bool is_complete() const { return is_complete_; }
  /// Of the communicator. That the hub has gone is one for who has work there.
  ncclResult_t error(bool has_work) const;
  /// The end of the communicator: ends what run() waits for.
  void leave();
  /// Of a stream: does what run_collective() and run_messages() do. `number`: of a collective.
  void run(const NcclComm& comm, std::uint64_t number, const std::vector<NcclArgs>& all);

 private:
  const std::string name_;
  const std::uint64_t clique_;
  const int rank_;
  int link_;            // -1: it has gone, or this has left
  std::set<int> open_;  // connections that run() waits at
  bool is_complete_ = false, is_lost_ = false;
  ncclResult_t error_ = ncclSuccess;
};

// --- What happens on streams (nccl_work.cc). It blocks there, and throws what breaks the device.

void run_collective(const std::shared_ptr<NcclComm>& comm, std::uint64_t number,
                    const NcclArgs& args);
/// The sends and receives of one group.
void run_messages(const std::shared_ptr<NcclComm>& comm, const std::vector<NcclArgs>& all);
/// Until the communicator is aborted.
void hang(const NcclComm& comm);
/// Whether operations of guests are about to end, so that their process is not to end before them.
/// Under the mutex.
bool owes_replies(const NcclClique& clique);
/// What was released without its data. Not seen: nobody may look there, peers may still read.
void poison(const NcclArgs& args, std::size_t num_ranks);

}  // namespace tessera::cuda_emulation
