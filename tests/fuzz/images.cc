// The four files of MNIST, plain or compressed.
#include <algorithm>

#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"
#include "tools/data/fashion_mnist.h"

namespace tessera::fuzz {

const char* const kTarget = "images";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  std::vector<std::string_view> parts = parts_of(input);
  parts.resize(4);
  folder.write("train-images-idx3-ubyte", parts[0]);
  folder.write("train-labels-idx1-ubyte", parts[1]);
  folder.write("t10k-images-idx3-ubyte", parts[2]);
  folder.write("t10k-labels-idx1-ubyte", parts[3]);
  const tools::FashionMnist data = tools::load_fashion_mnist(folder.path());
  for (const tools::ImageSet* set : {&data.train, &data.test}) {
    promise(std::ssize(set->pixels) == set->num_images * set->num_pixels() &&
                std::ssize(set->labels) == set->num_images,
            "expected as many pixels and labels as images");
    promise(std::ranges::all_of(set->labels, [](auto label) { return label < 10; }),
            "expected labels below 10");
  }
}

}  // namespace tessera::fuzz
