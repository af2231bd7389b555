// NCCL, found when it is first needed, so that a program that can use it starts where it is absent.
// Types come from the toolkit's header. Private to comm; only where CUDA is built.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>

namespace tessera::comm {

/// The functions of a loaded NCCL, under the names of nccl.h.
struct NcclLibrary {
  /// NCCL_VERSION(2, 22, 0): several communicators can be aborted in a group from here on.
  static constexpr int kMinVersion = 22200;

  /// Without a path: the NCCL that this process already has, else libnccl.so.2 as the loader finds
  /// it. Throws DeviceError if there is none, or one that is too old. Stays loaded for good.
  static std::shared_ptr<const NcclLibrary> load(const std::string& path);

  int version = 0;
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
};

/// "2.22.3"
std::string version_text(int version);

}  // namespace tessera::comm
