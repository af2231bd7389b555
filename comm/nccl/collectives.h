// The collectives as calls of NCCL and kernels. Private to comm; only where CUDA is built.
#pragma once

#include <cstdint>

#include "comm/nccl/endpoint.h"
#include "comm/process_group.h"
#include "comm/staging.h"

namespace tessera::comm {

/// Enqueues this rank's share of `collective` on `gpu`, inside the function given to launch().
/// Returns how many bytes NCCL was given to send to other ranks. Throws CommError if NCCL refuses,
/// DeviceError.
std::int64_t enqueue_nccl(const Collective& collective, int rank, int size, bool canonical,
                          NcclEndpoint& endpoint, Staging& staging, const Stream& gpu);

}  // namespace tessera::comm
