// The flags of a comparison that takes seconds: two strategies by two prefetch depths.
#pragma once

#include <string>

#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera::testing {

/// Flags of a comparison whose data and results lie in `folder`, the latter in "out".
inline Flags tiny_comparison(const TempFolder& folder) {
  std::string text;
  while (text.size() < 2000) text += "In the beginning God created the heaven and the earth.\n";
  return {{"data.path", folder.write("text.txt", text)},
          {"model.layers", "2"},
          {"model.heads", "2"},
          {"model.dim", "8"},
          {"model.seq", "8"},
          {"train.batch", "1"},
          {"train.steps", "4"},
          {"warmup_steps", "1"},
          {"parallel.ranks", "2"},
          {"device", "cpu"},
          {"log.peak_ms", "0"},
          {"strategies", "ddp,zero3"},
          {"sweep", "parallel.prefetch=0,1"},
          {"out", folder / "out"}};
}

}  // namespace tessera::testing
