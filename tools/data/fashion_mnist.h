// Labelled images in the IDX format of MNIST and Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

struct ImageSet {
  std::int64_t num_images = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::vector<std::uint8_t> pixels;  ///< (num_images, height, width)
  std::vector<std::uint8_t> labels;  ///< (num_images), below 10

  std::int64_t num_pixels() const { return height * width; }  ///< of one image
};

struct FashionMnist {
  ImageSet train;
  ImageSet test;
};

/// Loads {train,t10k}-{images-idx3,labels-idx1}-ubyte from `folder`, each plain or with .gz. Throws
/// IoError naming the file: missing, wrong magic, dimensions out of range, counts that differ,
/// a label of 10 or more, short, damaged or longer than its header says.
FashionMnist load_fashion_mnist(const std::string& folder);

}  // namespace tessera::tools
