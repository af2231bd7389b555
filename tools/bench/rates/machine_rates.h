// What plans ask of a machine (see tools/config/rates_config.h), measured in less than a second.
#pragma once

#include <string>

#include "engine/dtype.h"
#include "engine/meta.h"

namespace tessera::tools {

/// The rates of one of `num_ranks` thread ranks that all work at once: products of operands of
/// `dtype`, copies beyond every cache, gathers of a few megabytes, and what a gather of one element
/// takes.
engine::MetaRates measure_rates(int num_ranks, engine::DType dtype);
/// How many ranks measure_rates() is given: one for each core, at least the 2 that it takes to send
/// something, at most 8.
int num_rated_ranks(int num_cores);

/// "--rates.gflops=143 --rates.memory_gbs=11.2 --rates.link_gbs=4.7 --rates.link_latency_us=21",
/// without what is 0.
std::string rates_flags(const engine::MetaRates& rates);

}  // namespace tessera::tools
