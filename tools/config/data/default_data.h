// The data that `bazel run` lays where a trainer starts, and how else to get it: see data_path().
#pragma once

namespace tessera::tools {

inline constexpr const char* kDefaultText = "third_party/data/kjv.txt";
inline constexpr const char* kHowToGetText =
    "give --data.path=FILE: any text, such as kjv.txt of `sudo apt-get install bible-kjv && bible "
    "-f Gen1:1-Rev22:21 > kjv.txt`";

inline constexpr const char* kDefaultImages = "third_party/data/fashion_mnist";
inline constexpr const char* kHowToGetImages =
    "give --data.path=FOLDER: of IDX files, such as /usr/share/datasets/fashion-mnist of `sudo "
    "apt-get install dataset-fashion-mnist`";

}  // namespace tessera::tools
