// One of several processes that Open MPI's mpirun starts: its own collectives, as a program of MPI
// calls them. open_mpi_process NUM_SAMPLES
#include <dlfcn.h>

#include <string>

#include "engine/error.h"
#include "tools/bench/processes/calls.h"
#include "tools/cli/main.h"

namespace tessera::tools {
namespace {

using engine::Tensor;

class OpenMpi final : public Collectives {
 public:
  OpenMpi() {
    check(find<int(int*, char***)>("MPI_Init")(nullptr, nullptr), "MPI_Init");
    using Number = int(void*, int*);
    check(find<Number>("MPI_Comm_rank")(world_, &process_), "MPI_Comm_rank");
    check(find<Number>("MPI_Comm_size")(world_, &num_processes_), "MPI_Comm_size");
  }
  ~OpenMpi() override { find<int()>("MPI_Finalize")(); }
  OpenMpi(const OpenMpi&) = delete;
  OpenMpi& operator=(const OpenMpi&) = delete;

  int process() const override { return process_; }
  int num_processes() const override { return num_processes_; }
  void all_gather(const Tensor& in, const Tensor& out) override {
    check(all_gather_(in.raw(), count(in), float_, out.raw(), count(in), float_, world_),
          "MPI_Allgather");
  }
  void reduce_scatter(const Tensor& in, const Tensor& out) override {
    check(reduce_scatter_(in.raw(), out.raw(), count(out), float_, sum_, world_),
          "MPI_Reduce_scatter_block");
  }
  void all_reduce(const Tensor& in, const Tensor& out) override {
    check(all_reduce_(in.raw(), out.raw(), count(in), float_, sum_, world_), "MPI_Allreduce");
  }
  void broadcast(const Tensor& inout, int root) override {
    check(broadcast_(inout.raw(), count(inout), float_, root, world_), "MPI_Bcast");
  }

 private:
  static int count(const Tensor& tensor) { return static_cast<int>(tensor.numel()); }
  static void check(int code, const char* function) {
    engine::require<engine::CommError>(code == 0, "[bench] expected {} to succeed, got error {}",
                                       function, code);
  }
  static void* symbol(const char* name) {
    static void* const library = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    void* const found = library == nullptr ? nullptr : dlsym(library, name);
    engine::require<engine::DeviceError>(found != nullptr,
                                         "[bench] expected libmpi.so.40 with {}, got none", name);
    return found;
  }
  template <class F>
  static F* find(const char* name) {
    return reinterpret_cast<F*>(symbol(name));
  }

  void* const world_ = symbol("ompi_mpi_comm_world");
  void* const float_ = symbol("ompi_mpi_float");
  void* const sum_ = symbol("ompi_mpi_op_sum");
  using AllGather = int(const void*, int, void*, void*, int, void*, void*);
  using Reduce = int(const void*, void*, int, void*, void*, void*);
  AllGather* const all_gather_ = find<AllGather>("MPI_Allgather");
  Reduce* const reduce_scatter_ = find<Reduce>("MPI_Reduce_scatter_block");
  Reduce* const all_reduce_ = find<Reduce>("MPI_Allreduce");
  using Broadcast = int(void*, int, void*, int, void*);
  Broadcast* const broadcast_ = find<Broadcast>("MPI_Bcast");
  int process_ = 0, num_processes_ = 0;
};

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] {
    tessera::engine::require(argc == 2, "expected open_mpi_process NUM_SAMPLES");
    tessera::tools::OpenMpi mpi;
    tessera::tools::time_calls(mpi, std::stoll(argv[1]));
  });
}
