#include "comm/nccl/library.h"

#include <dlfcn.h>

#include "comm/nccl.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::DeviceError;

template <class F>
void find(void* handle, const char* name, const std::string& where, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  engine::require<DeviceError>(function != nullptr,
                               "[nccl] expected {} to have {}, got no such symbol", where, name);
}

}  // namespace

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::shared_ptr<const NcclLibrary> NcclLibrary::load(const std::string& path) {
  std::string where = "this process";
  void* handle = RTLD_DEFAULT;
  if (!path.empty() || dlsym(RTLD_DEFAULT, "ncclGetVersion") == nullptr) {
    where = path.empty() ? "libnccl.so.2" : path;
    handle = dlopen(where.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
      const char* error = dlerror();
      engine::fail<DeviceError>(
          "[nccl] expected the NCCL library {}, got: {} (several ranks on one GPU need none: "
          "comm:threads)",
          where, error != nullptr ? error : "no reason");
    }
  }
  auto library = std::make_shared<NcclLibrary>();
  NcclLibrary& l = *library;
  find(handle, "ncclGetVersion", where, l.get_version);
  engine::require<DeviceError>(l.get_version(&l.version) == ncclSuccess,
                               "[nccl] expected {} to tell its version, got an error", where);
  engine::require<DeviceError>(l.version >= kMinVersion,
                               "[nccl] expected NCCL {} or newer, got {} ({})",
                               version_text(kMinVersion), version_text(l.version), where);
  find(handle, "ncclGetErrorString", where, l.get_error_string);
  find(handle, "ncclGetLastError", where, l.get_last_error);
  find(handle, "ncclGetUniqueId", where, l.get_unique_id);
  find(handle, "ncclCommInitRankConfig", where, l.comm_init_rank_config);
  find(handle, "ncclCommGetAsyncError", where, l.comm_get_async_error);
  find(handle, "ncclCommFinalize", where, l.comm_finalize);
  find(handle, "ncclCommDestroy", where, l.comm_destroy);
  find(handle, "ncclCommAbort", where, l.comm_abort);
  find(handle, "ncclGroupStart", where, l.group_start);
  find(handle, "ncclGroupEnd", where, l.group_end);
  find(handle, "ncclAllGather", where, l.all_gather);
  find(handle, "ncclReduceScatter", where, l.reduce_scatter);
  find(handle, "ncclAllReduce", where, l.all_reduce);
  find(handle, "ncclBroadcast", where, l.broadcast);
  find(handle, "ncclSend", where, l.send);
  find(handle, "ncclRecv", where, l.recv);
  return library;
}

std::string nccl_version(const std::string& library_path) {
  return version_text(NcclLibrary::load(library_path)->version);
}

}  // namespace tessera::comm
