// What the symbol tables of the running program tell about kernels.
//
// [Note: static shared memory] device.h makes a __shared__ variable a thread_local static whose
// symbol carries an ABI tag, and gives kernels another. The table thus has place and size of every
// such variable and the function it belongs to, so that a block can find it poisoned and not as the
// last block left it. A stripped program has no such table: kernel_symbols() throws.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::cuda_emulation {

/// A variable in the thread-local storage of a module of the program.
struct ThreadLocal {
  std::size_t module = 0;  ///< as for __tls_get_addr
  std::size_t offset = 0;
  std::size_t nbytes = 0;

  /// Where the calling thread has it.
  void* address() const;
};

struct KernelSymbols {
  std::string name;                              ///< demangled, without parameters
  std::vector<ThreadLocal> shared;               ///< of the kernel itself
  std::vector<ThreadLocal> shared_of_functions;  ///< of all functions that are no kernels
};

/// Lives as long as the program. Throws std::runtime_error if the program has no symbol for
/// `kernel`.
const KernelSymbols& kernel_symbols(const void* kernel);

}  // namespace tessera::cuda_emulation
