// The collectives as calls of NCCL and kernels. Private to comm; only where CUDA is built.
#pragma once

#include <cstdint>
#include <map>

#include "comm/nccl/endpoint.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// Memory between NCCL and the sums: one block a stream, which grows to the largest need, as work
/// of its stream follows that of the memory's home. From the memory of the collective's `out`.
class NcclStaging {
 public:
  NcclStaging() = default;
  ~NcclStaging();
  NcclStaging(const NcclStaging&) = delete;
  NcclStaging& operator=(const NcclStaging&) = delete;

  /// `nbytes` for work that `gpu` is told next.
  std::byte* get(std::int64_t nbytes, const engine::Memory& memory, const Stream& gpu);

 private:
  struct Block {
    Stream stream;
    Tensor bytes;
  };
  static void let_go(const Block& block);
  std::map<const void*, Block> blocks_;  // by stream
};

/// Enqueues this rank's share of `collective` on `gpu`, inside the function given to launch().
/// Returns how many bytes NCCL was given to send to other ranks. Throws CommError if NCCL refuses,
/// DeviceError.
std::int64_t enqueue_nccl(const Collective& collective, int rank, int size, bool canonical,
                          NcclEndpoint& endpoint, NcclStaging& staging, const Stream& gpu);

}  // namespace tessera::comm
