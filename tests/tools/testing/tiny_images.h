// Images of 2 x 2 pixels, in the files that train_mlp reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/testing/temp_folder.h"

namespace tessera::testing {

struct Images {
  std::string pixels, labels;

  void add(std::uint8_t pixel, int label) {
    for (int i = 0; i < 4; ++i) pixels += static_cast<char>(i == 0 ? pixel : 255 - pixel + i % 2);
    labels += static_cast<char>(label);
  }
  /// Two IDX files below `folder`, whose names begin with `name`: train or t10k.
  void write(const TempFolder& folder, const std::string& name) const {
    const auto word = [](std::size_t n) {
      return std::string{static_cast<char>(n >> 24), static_cast<char>(n >> 16),
                         static_cast<char>(n >> 8), static_cast<char>(n)};
    };
    folder.write(name + "-images-idx3-ubyte",
                 word(0x803) + word(labels.size()) + word(2) + word(2) + pixels);
    folder.write(name + "-labels-idx1-ubyte", word(0x801) + word(labels.size()) + labels);
  }
};

}  // namespace tessera::testing
