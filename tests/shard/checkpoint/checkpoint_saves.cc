// Trains a second step and saves it: the program that checkpoint_crash_test kills.
//
//   checkpoint_saves FOLDER async|sync
#include <string>

#include "tests/shard/checkpoint/checkpoint_crash_run.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  tessera::testing::train_saving(
      tessera::testing::crash_run(argv[1], 2, std::string(argv[2]) == "async"));
}
