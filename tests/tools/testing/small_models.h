// A small model of each family, as transformers saved it, and tokens that it learns.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/testing/program.h"
#include "tools/models/family.h"

namespace tessera::testing {

struct SmallModel {
  std::string family, path;  ///< of ModelFamily::name(); folder
  std::string tokens;        ///< file
};

/// One of each of tools::families(). Throws std::out_of_range for a family that has none.
inline std::vector<SmallModel> small_model_of_each_family() {
  const std::string golden = "tests/golden/", llama = golden + "llama/",
                    neox = golden + "gpt_neox/";
  const std::map<std::string, SmallModel> all = {
      {"gpt2", {"gpt2", golden + "gpt2_tiny", golden + "gpt2_tiny_tokens.bin"}},
      {"llama", {"llama", llama + "llama_scaled", llama + "tokens.bin"}},
      {"mistral", {"mistral", llama + "mistral_grouped", llama + "tokens.bin"}},
      {"qwen2", {"qwen2", llama + "qwen2_tied", llama + "tokens.bin"}},
      {"qwen3", {"qwen3", llama + "qwen3_biases", llama + "tokens.bin"}},
      {"gpt_neox", {"gpt_neox", neox + "neox_quarter", neox + "tokens.bin"}}};
  std::vector<SmallModel> models;
  for (const tools::ModelFamily* family : tools::families()) {
    models.push_back(all.at(family->name()));
  }
  return models;
}

/// Of a training that starts from `model`, and has `flags` otherwise.
inline Flags starting_from(const SmallModel& model, Flags flags) {
  for (const char* size : {"model.layers", "model.heads", "model.dim"}) flags.erase(size);
  flags["init.from"] = model.path;
  flags["data.path"] = model.tokens;
  return flags;
}

}  // namespace tessera::testing
