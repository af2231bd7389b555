// A profiler as NVTX finds it, by NVTX_INJECTION64_PATH: writes the ranges of each thread into the
// file that NVTX_LOG names, a line each: "THREAD > text" and "THREAD <".
#include <nvtx3/nvToolsExt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace {

void write_line(const char* mark, const char* text) {
  static std::mutex mutex;
  static std::FILE* const kFile = std::fopen(std::getenv("NVTX_LOG"), "w");
  const std::lock_guard lock(mutex);
  std::fprintf(kFile, "%ld %s%s\n", ::syscall(SYS_gettid), mark, text);
  std::fflush(kFile);
}

int NVTX_API push(const char* text) {
  write_line("> ", text);
  return 0;
}

int NVTX_API pop() {
  write_line("<", "");
  return 0;
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): NVTX looks for this name
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &size) == 0) return 0;
  *functions[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
