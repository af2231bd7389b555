#include "comm/threads/peer_collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "comm/threads/rank_order.h"
#include "engine/cuda.h"
#include "engine/cuda_check.h"

namespace tessera::comm {
namespace {

using engine::check_cuda;

// A moment of a GPU stream, cheaper than engine::Event: nobody waits for it on the host.
class Moment {
 public:
  Moment() {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
  }
  ~Moment() { (void)cudaEventDestroy(event_); }
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;

  void record(const Stream& stream) {
    check_cuda(cudaEventRecord(event_, native(stream)), "cudaEventRecord");
    recorded_ = true;
  }
  // An event of a GPU that has failed says so, to whoever asks.
  void check(int world_rank) const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
    } else if (status != cudaSuccess) {
      check_cuda(status, fmt::format("the share of rank {}", world_rank));
    }
  }
  void hold_up(const Stream& stream) const {
    if (recorded_) {
      check_cuda(cudaStreamWaitEvent(native(stream), event_, 0), "cudaStreamWaitEvent");
    }
  }

 private:
  static cudaStream_t native(const Stream& stream) {
    return static_cast<cudaStream_t>(stream.native());
  }
  cudaEvent_t event_ = nullptr;
  std::atomic<bool> recorded_ = false;
};

// What a rank brings. Its peers hold it until they have waited for its events.
struct Share : std::enable_shared_from_this<Share> {
  Share(const Collective& c, const Stream& s, int num_ranks)
      : collective(c), stream(s), peers(static_cast<std::size_t>(num_ranks)) {}

  const std::byte* in() const { return collective.in.raw(); }
  std::byte* out() const { return collective.out.raw(); }

  const Collective& collective;  // of the rank that brings it: not read after the meeting
  const Stream& stream;
  Moment ready, done;
  std::vector<std::shared_ptr<Share>> peers;  // by rank, itself included
};

Share& share_of(const Slot& slot) { return *static_cast<Share*>(slot.out); }

// GPUs whose memory kernels of a stream may touch.
struct Reach {
  explicit Reach(const Stream&) {}
  std::set<int> gpus;
};

// Lets kernels of `stream` touch the memory of `gpu`.
void reach(const Stream& stream, int gpu) {
  const int own = stream.device().index;
  if (gpu == own || !stream.state<Reach>().gpus.insert(gpu).second) return;
  int can_access = 0;
  check_cuda(cudaDeviceCanAccessPeer(&can_access, own, gpu), "cudaDeviceCanAccessPeer");
  engine::require<engine::DeviceError>(
      can_access != 0, "[threads] expected cuda:{} to reach the memory of cuda:{}, got no access",
      own, gpu);
  const cudaError_t status = cudaDeviceEnablePeerAccess(gpu, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    check_cuda(status, "cudaDeviceEnablePeerAccess");
  }
}

// out + offset = `nbytes` from `src`, unless it is there already.
void copy_to_own(const Share& own, std::int64_t offset, const std::byte* src, std::int64_t nbytes) {
  std::byte* dst = own.out() + offset;
  if (dst != src) engine::cuda::copy(own.stream, dst, src, nbytes);
}

// Sums [begin, begin + numel) of all ins, from the running sum at `start`, to `outs`.
void sum_peers(const Share& own, std::int64_t begin, std::int64_t numel, const float* start,
               std::span<float* const> outs) {
  std::array<const void*, kMaxGpuOuts> ins{};
  for (std::size_t r = 0; r < own.peers.size(); ++r) {
    reach(own.stream, own.peers[r]->stream.device().index);
    ins[r] = own.peers[r]->in() + begin * size_of(own.collective.in.dtype());
  }
  sum_in_rank_order_on_gpu(
      own.stream, own.collective.in.dtype(), std::span(ins).first(own.peers.size()),
      own.collective.accumulate == Accumulate::kYes ? start : nullptr, outs, numel);
}

void reduce_all(const Share& own, int rank) {
  // Parts begin where 16-byte accesses do.
  constexpr std::int64_t kGrain = 64;
  const auto size = static_cast<std::int64_t>(own.peers.size());
  const std::int64_t all = own.collective.out.numel();
  const std::int64_t part = (all + size * kGrain - 1) / (size * kGrain) * kGrain;
  const std::int64_t begin = std::min(all, rank * part);
  std::array<float*, kMaxGpuOuts> outs{};
  for (std::size_t r = 0; r < own.peers.size(); ++r) {
    outs[r] = reinterpret_cast<float*>(own.peers[r]->out()) + begin;
  }
  sum_peers(own, begin, std::min(part, all - begin), outs[0],
            std::span(outs).first(own.peers.size()));
}

void enqueue_share(const Share& own, int rank) {
  const Collective& c = own.collective;
  const auto size = static_cast<std::int64_t>(own.peers.size());
  switch (c.op) {
    case Collective::Op::kAllGather:
      for (std::int64_t r = 0; r < size; ++r) {
        copy_to_own(own, r * c.in.nbytes(), own.peers[static_cast<std::size_t>(r)]->in(),
                    c.in.nbytes());
      }
      return;
    case Collective::Op::kBroadcast:
      return copy_to_own(own, 0, own.peers[static_cast<std::size_t>(c.root)]->in(), c.out.nbytes());
    case Collective::Op::kAllToAll: {
      const std::int64_t part = c.in.nbytes() / size;
      for (std::int64_t r = 0; r < size; ++r) {
        copy_to_own(own, r * part, own.peers[static_cast<std::size_t>(r)]->in() + rank * part,
                    part);
      }
      return;
    }
    case Collective::Op::kReduceScatter: {
      auto* const out = reinterpret_cast<float*>(own.out());
      return sum_peers(own, rank * c.out.numel(), c.out.numel(), out, {&out, 1});
    }
    case Collective::Op::kAllReduce:
      return reduce_all(own, rank);
  }
}

// Whether the share of rank `who` reads or writes memory of rank `whose`.
bool touches(const Collective& c, std::size_t who, std::size_t whose) {
  return who != whose &&
         (c.op != Collective::Op::kBroadcast || whose == static_cast<std::size_t>(c.root));
}

// What `own` enqueued before an error may still read: it is waited for all the same.
void run_share(Share& own, std::span<const Slot> slots, int rank) {
  for (std::size_t r = 0; r < slots.size(); ++r) {
    own.peers[r] = share_of(slots[r]).shared_from_this();
  }
  for (std::size_t r = 0; r < slots.size(); ++r) {
    if (touches(own.collective, static_cast<std::size_t>(rank), r)) {
      own.peers[r]->ready.hold_up(own.stream);
    }
  }
  try {
    enqueue_share(own, rank);
  } catch (...) {
    own.done.record(own.stream);
    throw;
  }
  own.done.record(own.stream);
}

std::vector<std::shared_ptr<Share>> wait_for_peers(Share& own, int rank) {
  auto peers = std::move(own.peers);  // no longer one that holds itself
  for (std::size_t r = 0; r < peers.size(); ++r) {
    if (peers[r] && touches(own.collective, r, static_cast<std::size_t>(rank))) {
      peers[r]->done.hold_up(own.stream);
    }
  }
  return peers;
}

}  // namespace

std::function<void()> meet_on_gpu(Rendezvous& rendezvous, int rank, const Call& call,
                                  const Collective& collective, const Stream& gpu) {
  engine::require(rendezvous.size() <= kMaxGpuOuts,
                  "[threads] expected at most {} ranks for GPU memory, got {}", kMaxGpuOuts,
                  rendezvous.size());
  const auto own = std::make_shared<Share>(collective, gpu, rendezvous.size());
  own->ready.record(gpu);
  const Chunks chunks{.num_per_block = 1,
                      .shared = false,
                      .run = [](std::span<const Slot> slots, int block, std::int64_t) {
                        run_share(share_of(slots[static_cast<std::size_t>(block)]), slots, block);
                      }};
  try {
    rendezvous.meet(rank, call, {.in = nullptr, .out = own.get()}, chunks);
  } catch (...) {
    // The memory of this rank may be freed next, while peers still read it.
    try {
      wait_for_peers(*own, rank);
    } catch (const engine::DeviceError&) {  // the GPU is lost, and with it the readers
    }
    throw;
  }
  return [&rendezvous, peers = wait_for_peers(*own, rank)] {
    for (std::size_t r = 0; r < peers.size(); ++r) {
      peers[r]->done.check(rendezvous.world_rank(static_cast<int>(r)));
    }
  };
}

}  // namespace tessera::comm
