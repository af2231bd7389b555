// What computes on the CPU: the instruction set, and who multiplies matrices.
#pragma once

#include <string>

#include "tools/config/train_config.h"
#include "tools/machine/limits.h"
#include "tools/report/local_ranks.h"

namespace tessera::tools {

/// Makes `config` the choice of this process, over what the environment says. Throws
/// InvalidArgument naming the option, or the variable where it is "auto", for what the CPU or the
/// machine lacks, or if something else is in use already.
void choose_cpu(const CpuConfig& config);
/// Throws InvalidArgument if `config` asks for more cores for `num_ranks` ranks of this process
/// than it may use.
void check_pins(const CpuConfig& config, int num_ranks,
                const MachineLimits& limits = read_limits());
/// Keeps the calling thread, which is that of `rank`, one of `ranks`, and those it starts, to cores
/// of its own, if `config` asks for it and check_pins() has passed.
void pin_rank(const CpuConfig& config, const LocalRanks& ranks, int rank);
/// "v4+amx, oneDNN 2.6.3 with 2 threads"
std::string cpu_text();

}  // namespace tessera::tools
