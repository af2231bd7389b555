// comm:nccl of a build whose CUDA toolkit came without NCCL's header.
#include "comm/nccl.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

[[noreturn]] void fail() {
  engine::fail<engine::DeviceError>(
      "[nccl] expected a build with NCCL, got one that found no nccl.h: install NCCL's headers and "
      "build again, or use comm:threads");
}

}  // namespace

std::string nccl_version(const std::string&) { fail(); }
std::vector<std::unique_ptr<ProcessGroup>> make_nccl_world(int, NcclOptions) { fail(); }
void run_nccl_ranks(int, NcclOptions, const std::function<void(ProcessGroup&)>&) { fail(); }
std::unique_ptr<ProcessGroup> join_nccl(const ControlOptions&, int, NcclOptions) { fail(); }
std::vector<std::unique_ptr<ProcessGroup>> join_nccl_ranks(const ControlOptions&, NcclOptions) {
  fail();
}
void run_joined_nccl_ranks(const ControlOptions&, NcclOptions,
                           const std::function<void(ProcessGroup&)>&) {
  fail();
}

}  // namespace tessera::comm
