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

}  // namespace tessera::tools
