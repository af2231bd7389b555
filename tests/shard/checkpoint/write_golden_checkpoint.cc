// Writes a checkpoint such as tests/golden/checkpoint_v1, which the first version wrote:
//
//   bazel run //tests/shard/checkpoint:write_golden_checkpoint -- /FOLDER
#include <cstdio>

#include "tests/shard/checkpoint/golden_checkpoint_run.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("expected a folder to write to\n", stderr);
    return 2;
  }
  auto run = tessera::testing::golden_run(2, "zero3");
  run.checkpoints = {.folder = argv[1], .keep = 1, .async = false};
  tessera::testing::train_saving(run);
}
