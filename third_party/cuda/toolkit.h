#pragma once

namespace tessera::cuda {

/// Version of the CUDA toolkit that the build used, 13000 for 13.0; 0 if it used none.
int toolkit_version();

}  // namespace tessera::cuda
