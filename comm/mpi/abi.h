// What mpi.h would define. MPI libraries agree on functions and differ in the types and values of
// constants: there are three such ABIs. Private to comm.
#pragma once

namespace tessera::comm {

/// The constants of one ABI, whose handles (communicators, requests) are of type
/// `Handle`.
template <class Handle>
struct MpiAbi {
  Handle comm_world, byte, errors_return;
  int thread_serialized, thread_multiple, any_source, tag_ub;
};

/// Larger than any ABI's.
struct MpiStatus {
  alignas(8) char bytes[64];
};
constexpr int kMpiMaxText = 8192;  ///< of MPI_Error_string and MPI_Get_library_version

/// MPICH, Intel MPI, MVAPICH, Cray MPICH: libmpi.so.12.
inline constexpr MpiAbi<int> kMpichAbi = {.comm_world = 0x44000000,
                                          .byte = 0x4c00010d,
                                          .errors_return = 0x54000001,
                                          .thread_serialized = 2,
                                          .thread_multiple = 3,
                                          .any_source = -2,
                                          .tag_ub = 0x64400001};

/// MPI 5.0, chapter 20: libmpi_abi.so.1.
inline MpiAbi<void*> standard_mpi_abi() {
  return {.comm_world = reinterpret_cast<void*>(0x101),
          .byte = reinterpret_cast<void*>(0x247),
          .errors_return = reinterpret_cast<void*>(0x143),
          .thread_serialized = 2048,
          .thread_multiple = 4096,
          .any_source = -1,
          .tag_ub = 501};
}

/// Open MPI 4 and 5, whose handles are addresses in the library: libmpi.so.40.
inline MpiAbi<void*> open_mpi_abi(void* comm_world, void* byte, void* errors_return) {
  return {.comm_world = comm_world,
          .byte = byte,
          .errors_return = errors_return,
          .thread_serialized = 2,
          .thread_multiple = 3,
          .any_source = -1,
          .tag_ub = 0};
}

}  // namespace tessera::comm
