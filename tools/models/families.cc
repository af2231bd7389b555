#include "tools/models/family.h"
#include "tools/models/gpt.h"

namespace tessera::tools {

const Families& families() {
  static const Families kAll = {
      &gpt_family(),
  };
  return kAll;
}

}  // namespace tessera::tools
