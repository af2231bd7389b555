// Where the data of a training are: --data.path.
#pragma once

#include <string>
#include <string_view>

namespace tessera::tools {

/// What the option data.path leads to, or, without one, `supplied`: data that Bazel lays where
/// `bazel run` starts the program, and beside the program, for who starts it otherwise. Throws
/// IoError that says how to get data where that is missing.
std::string data_path(const std::string& option, const std::string& supplied,
                      std::string_view how_to_get);

}  // namespace tessera::tools
