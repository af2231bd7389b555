#include "third_party/cuda/toolkit.h"

namespace tessera::cuda {

int toolkit_version() { return 0; }

}  // namespace tessera::cuda
