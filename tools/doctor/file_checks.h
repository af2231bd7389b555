// Data and folders that a training reads and writes.
#pragma once

#include <cstdint>
#include <string>

#include "tools/doctor/check.h"

namespace tessera::tools {

/// The text of train_transformer, found and read as it does; `option`: its --data.path, may be
/// empty. kFail if it cannot be used.
Check check_text(const std::string& option);
/// The images of train_mlp, found and read as it does; `option`: its --data.path, may be empty.
/// kFail if they cannot be used.
Check check_images(const std::string& option);
/// Whether `path`, which need not exist, can be made and written to, and how much room is left: at
/// least `wanted_nbytes`, or kWarn. Writes and removes a file in the nearest folder that exists,
/// and leaves nothing.
Check check_out(const std::string& path, std::int64_t wanted_nbytes);

}  // namespace tessera::tools
