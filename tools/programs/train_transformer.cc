// Trains a transformer, fully sharded over ranks: threads, processes, or threads of several
// processes.
#include "tools/cli/main.h"
#include "tools/models/family.h"
#include "tools/programs/run/run_task.h"
#include "tools/programs/transformer_task.h"

int main(int argc, char** argv) {
  namespace tools = tessera::tools;
  return tools::run_main([&] {
    tools::TransformerTask task;
    tools::run_task(argc, argv,
                    {"train_transformer",
                     "Trains a " + tools::titles() +
                         "-shaped transformer, fully sharded over ranks: threads, processes, or "
                         "threads of several processes."},
                    task);
  });
}
