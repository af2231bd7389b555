#include "tools/models/family.h"
#include "tools/models/gpt.h"
#include "tools/models/gpt_neox.h"
#include "tools/models/llama.h"

namespace tessera::tools {

const Families& families() {
  static const Families kAll = [] {
    Families all = {&gpt_family()};
    for (const ModelFamily* family : llama_families()) all.push_back(family);
    all.push_back(&gpt_neox_family());
    return all;
  }();
  return kAll;
}

const std::vector<std::string>& measured_presets() {
  static const std::vector<std::string> kNames = {"gpt2", "gpt2-medium", "gpt2-xl"};
  return kNames;
}

}  // namespace tessera::tools
