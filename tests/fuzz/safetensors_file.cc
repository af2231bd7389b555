// Files of safetensors.
#include "engine/io/safetensors.h"

#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"

namespace tessera::fuzz {

const char* const kTarget = "safetensors_file";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  const engine::SafetensorsFile file(folder.write("file", input));
  for (const engine::TensorInfo& tensor : file.tensors()) {
    promise(file.find(tensor.name) == &tensor, "expected to find each tensor by its name");
    if (!engine::SafetensorsFile::can_read(tensor)) continue;
    std::vector<float> values(static_cast<std::size_t>(engine::numel(tensor.shape)));
    file.read(tensor, 0, values);
  }
}

}  // namespace tessera::fuzz
