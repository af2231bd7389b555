// Folders of GPT-2: config.json, the header of model.safetensors and how many bytes follow it; or
// config.json, the index, and header and number of bytes of two shards.
#include <filesystem>

#include "tests/fuzz/weights.h"
#include "tools/huggingface/gpt2_files.h"

namespace tessera::fuzz {

const char* const kTarget = "gpt2_folder";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  const std::string index = folder / "model.safetensors.index.json";
  for (const std::string& path : {folder / "config.json", folder / "model.safetensors", index}) {
    std::filesystem::remove(path);
  }
  std::vector<std::string_view> parts = parts_of(input);
  parts.resize(6);
  if (!parts[0].empty()) folder.write("config.json", parts[0]);
  if (parts[3].empty()) {
    write_weights(folder, "model.safetensors", parts[1], parts[2]);
  } else {
    folder.write("model.safetensors.index.json", parts[1]);
    write_weights(folder, "a.safetensors", parts[2], parts[3]);
    write_weights(folder, "b.safetensors", parts[4], parts[5]);
  }
  const tools::Gpt2FileConfig config = tools::read_gpt2_config(folder.path());
  promise(config.n_embd % config.n_head == 0 && config.vocab_size > 0, "expected sizes that fit");
  tools::Gpt2Weights weights(folder.path());
  const std::vector<engine::TensorSpec> expected = {{.name = "wte.weight", .shape = {2, 2}},
                                                    {.name = "ln_f.bias", .shape = {2}}};
  weights.check_complete(expected);
  for (const engine::TensorSpec& tensor : expected) {
    promise(std::ssize(weights.lookup(tensor)) == engine::numel(tensor.shape),
            "expected all of a tensor");
  }
}

}  // namespace tessera::fuzz
