#include "comm/nccl/collectives.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "comm/staging.h"
#include "comm/threads/rank_order.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::DType;

// A part of memory that goes to one rank, or comes from it.
struct Part {
  std::byte* data;
  std::int64_t nbytes;
};

class Share {
 public:
  Share(const Collective& c, int rank, int size, bool canonical, NcclEndpoint& endpoint,
        Staging& staging, const Stream& gpu)
      : c_(c),
        rank_(rank),
        size_(size),
        staging_nbytes_(staging_nbytes(c, size, canonical)),
        endpoint_(endpoint),
        staging_(staging),
        gpu_(gpu),
        native_(static_cast<cudaStream_t>(gpu.native())) {}

  /// Bytes that NCCL was given to send to other ranks.
  std::int64_t nbytes_sent() const { return nbytes_sent_; }

  void all_gather() {
    nbytes_sent_ += c_.in.nbytes() * (size_ - 1);
    call(Purpose::kGather, "ncclAllGather", [&](const NcclLibrary& nccl, ncclComm_t comm) {
      return nccl.all_gather(c_.in.raw(), c_.out.raw(), bytes(c_.in), ncclUint8, comm, native_);
    });
  }

  void broadcast() {
    nbytes_sent_ += passed_on(c_.in.nbytes());
    call(Purpose::kGather, "ncclBroadcast", [&](const NcclLibrary& nccl, ncclComm_t comm) {
      return nccl.broadcast(c_.in.raw(), c_.out.raw(), bytes(c_.in), ncclUint8, c_.root, comm,
                            native_);
    });
  }

  void all_to_all() {
    const std::int64_t part = c_.in.nbytes() / size_;
    exchange(
        Purpose::kGather,
        [&](int r) {
          return Part{c_.in.raw() + r * part, part};
        },
        [&](int r) {
          return Part{c_.out.raw() + r * part, part};
        });
  }

  // All blocks come here and are folded from where they lie.
  void reduce_scatter_in_order() {
    const std::int64_t part = c_.in.nbytes() / size_;
    const std::int64_t stride = round_up_part(part);
    std::byte* const staged = stage();
    exchange(
        Purpose::kReduce,
        [&](int r) {
          return Part{c_.in.raw() + r * part, part};
        },
        [&](int r) {
          return Part{staged + r * stride, part};
        });
    fold(staged, stride, out(), out(), c_.out.numel());
  }

  // A reduce-scatter in the order of ranks with parts that may differ by some elements, and then
  // everybody's sums to everybody.
  void all_reduce_in_order() {
    const std::int64_t all = c_.out.numel();
    const std::int64_t part = all_reduce_part(all, size_);
    const auto begin = [&](int r) { return std::min(all, r * part); };
    const auto numel = [&](int r) { return begin(r + 1) - begin(r); };
    const std::int64_t in_size = size_of(c_.in.dtype());
    const std::int64_t f32_size = size_of(DType::kF32);

    std::byte* const staged = stage();
    exchange(
        Purpose::kReduce,
        [&](int r) {
          return Part{c_.in.raw() + begin(r) * in_size, numel(r) * in_size};
        },
        [&](int r) {
          return Part{staged + r * part * in_size, numel(rank_) * in_size};
        });
    float* const sums = out() + begin(rank_);
    fold(staged, part * in_size, sums, sums, numel(rank_));
    exchange(
        Purpose::kReduce,
        [&](int r) {
          return Part{reinterpret_cast<std::byte*>(sums), r == rank_ ? 0 : numel(rank_) * f32_size};
        },
        [&](int r) {
          return Part{reinterpret_cast<std::byte*>(out() + begin(r)),
                      r == rank_ ? 0 : numel(r) * f32_size};
        });
  }

  // Each rank's block goes to it; an all-reduce gathers the sums, too, in the same dtype.
  void reduce_scatter_fast() {
    const std::int64_t nbytes = reduce_fast("ncclReduceScatter", &NcclLibrary::reduce_scatter);
    nbytes_sent_ += nbytes * (size_ - 1);
  }
  void all_reduce_fast() {
    const std::int64_t nbytes = reduce_fast("ncclAllReduce", &NcclLibrary::all_reduce);
    nbytes_sent_ += 2 * passed_on(nbytes);
  }

 private:
  // What a rank sends of `nbytes` that go round all ranks, one part for each: all parts but one.
  std::int64_t passed_on(std::int64_t nbytes) const { return nbytes - nbytes / size_; }
  static std::size_t bytes(const Tensor& t) { return static_cast<std::size_t>(t.nbytes()); }
  float* out() const { return c_.out.data<float>(); }
  bool adds() const { return c_.accumulate == Accumulate::kYes; }
  std::byte* stage() {
    if (staging_nbytes_ == 0) return nullptr;
    return staging_.get(staging_nbytes_, c_.out.buffer()->memory(), gpu_).raw();
  }

  void call(Purpose purpose, std::string_view name,
            const std::function<ncclResult_t(const NcclLibrary&, ncclComm_t)>& fn) {
    endpoint_.communicator(purpose).call(name, endpoint_.world(), endpoint_.world().time_limit(),
                                         fn);
  }

  // Sends part(r) to each rank r, and receives what it sends into place(r). Empty ones do not
  // count.
  void exchange(Purpose purpose, const std::function<Part(int)>& part,
                const std::function<Part(int)>& place) {
    call(purpose, "a group of ncclSend and ncclRecv",
         [&](const NcclLibrary& nccl, ncclComm_t comm) {
           ncclResult_t result = nccl.group_start();
           const auto keep = [&](ncclResult_t r) {
             if (r != ncclSuccess && r != ncclInProgress && result == ncclSuccess) result = r;
           };
           if (result != ncclSuccess) return result;
           for (int r = 0; r < size_; ++r) {
             const Part from = part(r), to = place(r);
             if (from.nbytes > 0) {
               if (r != rank_) nbytes_sent_ += from.nbytes;
               keep(nccl.send(from.data, static_cast<std::size_t>(from.nbytes), ncclUint8, r, comm,
                              native_));
             }
             if (to.nbytes > 0) {
               keep(nccl.recv(to.data, static_cast<std::size_t>(to.nbytes), ncclUint8, r, comm,
                              native_));
             }
           }
           const ncclResult_t end = nccl.group_end();
           return result == ncclSuccess ? end : result;
         });
  }

  // The sum of all ranks' blocks, `stride` bytes apart, in rank order.
  void fold(const std::byte* blocks, std::int64_t stride, const float* start, float* sums,
            std::int64_t numel) {
    std::vector<const void*> ins;
    for (int r = 0; r < size_; ++r) ins.push_back(blocks + r * stride);
    sum_in_rank_order_on_gpu(gpu_, c_.in.dtype(), ins, adds() ? start : nullptr, {&sums, 1}, numel);
  }

  // NCCL sums in the dtype of the inputs, into `out` if it can, else into memory beside it, from
  // where one kernel widens the sums and adds them to what `out` holds. Returns the bytes of the
  // sum that NCCL was asked for.
  std::int64_t reduce_fast(std::string_view name,
                           decltype(NcclLibrary::all_reduce) NcclLibrary::*function) {
    const bool is_f32 = c_.in.dtype() == DType::kF32;
    const bool is_direct = is_f32 && !adds();
    const std::int64_t numel = c_.out.numel();
    void* const sum = is_direct ? out() : static_cast<void*>(stage());
    call(Purpose::kReduce, name, [&](const NcclLibrary& nccl, ncclComm_t comm) {
      return (nccl.*function)(c_.in.raw(), sum, static_cast<std::size_t>(numel),
                              is_f32 ? ncclFloat32 : ncclBfloat16, ncclSum, comm, native_);
    });
    const std::int64_t nbytes = numel * size_of(is_f32 ? DType::kF32 : DType::kBF16);
    if (is_direct) return nbytes;
    const void* const in = sum;
    float* const to = out();
    sum_in_rank_order_on_gpu(gpu_, c_.in.dtype(), {&in, 1}, adds() ? to : nullptr, {&to, 1}, numel);
    return nbytes;
  }

  const Collective& c_;
  const int rank_;
  const int size_;
  const std::int64_t staging_nbytes_;
  NcclEndpoint& endpoint_;
  Staging& staging_;
  const Stream& gpu_;
  cudaStream_t const native_;
  std::int64_t nbytes_sent_ = 0;
};

}  // namespace

std::int64_t enqueue_nccl(const Collective& collective, int rank, int size, bool canonical,
                          NcclEndpoint& endpoint, Staging& staging, const Stream& gpu) {
  if (collective.in.numel() == 0) return 0;
  Share share(collective, rank, size, canonical, endpoint, staging, gpu);
  switch (collective.op) {
    case Collective::Op::kAllGather:
      share.all_gather();
      break;
    case Collective::Op::kBroadcast:
      share.broadcast();
      break;
    case Collective::Op::kAllToAll:
      share.all_to_all();
      break;
    case Collective::Op::kReduceScatter:
      canonical ? share.reduce_scatter_in_order() : share.reduce_scatter_fast();
      break;
    case Collective::Op::kAllReduce:
      canonical ? share.all_reduce_in_order() : share.all_reduce_fast();
      break;
  }
  return share.nbytes_sent();
}

}  // namespace tessera::comm
