// What a training does between its steps without recording it on the tape: its validation.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "tools/train/batch_loader.h"

namespace tessera::tools {

struct UnrecordedPass {
  std::string name;                                                 ///< "validation"
  std::vector<BatchTensor> tensors;                                 ///< of a batch
  std::function<void(engine::Tape& tape, const Batch& batch)> run;  ///< one batch of it
};

}  // namespace tessera::tools
