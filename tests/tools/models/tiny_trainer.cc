// The trainer's program with one more family.
#include "tests/tools/testing/tiny_family.h"
#include "tools/cli/main.h"
#include "tools/programs/run/run_task.h"
#include "tools/programs/transformer_task.h"

int main(int argc, char** argv) {
  namespace tools = tessera::tools;
  return tools::run_main([&] {
    tools::TransformerTask task(tessera::testing::families_and_tiny());
    tools::run_task(argc, argv, {"tiny_trainer", "Trains a model of any family."}, task);
  });
}
