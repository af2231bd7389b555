#include "tools/compare/request/compare_config.h"

namespace tessera::tools {

void CompareConfig::add_to(FlagSet& flags) {
  flags.add(
      "strategies", &strategies,
      {.help = "values of parallel.strategy to compare, with commas between, or all; the first is "
               "the baseline; hsdp:2 is hsdp with parallel.shard_ranks=2, and so for other "
               "hybrids; empty: parallel.strategy alone"});
  flags.add("sweep", &sweep,
            {.help = "key=value,value,...: every value of an option of the training with every "
                     "other; several, apart by spaces or as several flags"});
  flags.add("find_divergence", &find_divergence,
            {.help = "--find-divergence A B: instead of comparing losses, name the first tensor of "
                     "which A and B have different bits; each is a strategy, options as "
                     "'key=value key=value' over those of this command, or a file of --log.probe"});
  flags.add(
      "rounds", &rounds,
      {.help = "how often all are trained, in an order drawn for each round; one shows parity, "
               "while to tell which is faster two configurations need 6, four 8, eight 11",
       .min = 1,
       .max = 1000});
  flags.add("warmup_steps", &warmup_steps,
            {.help = "first steps of each training that medians leave out", .min = 0});
  flags.add(
      "tolerance", &tolerance,
      {.help = "largest difference of a step's loss between configurations of one training in "
               "another arithmetic; within an arithmetic bits must be equal",
       .min = 0});
  flags.add("resume", &resume,
            {.help = "keep what an interrupted comparison in the output folder has finished, and "
                     "train the rest"});
  flags.add("launch", &launch,
            {.help = "command that starts each training as several processes, such as 'mpirun -n "
                     "4', 'srun -N2 --ntasks-per-node=2' or 'torchrun --no-python "
                     "--nproc-per-node=4'; a training with parallel.launcher=threads is started "
                     "without it, as one process; empty: every training is one process"});
  flags.add("report", &report,
            {.help = "file of the page; empty: report.html in the output folder"});
  flags.add("trainer", &trainer,
            {.help = "program that trains, as train_transformer does; relative to where this one "
                     "starts, as `bazel run` lays it there"});
}

}  // namespace tessera::tools
