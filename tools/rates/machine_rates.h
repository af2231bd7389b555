// What plans ask of a machine (see tools/config/rates_config.h), measured in less than a second.
#pragma once

#include <string>

#include "engine/dtype.h"
#include "engine/meta.h"

namespace tessera::tools {

/// The rates of one of `num_ranks` thread ranks that all work at once: products of operands of
/// `dtype`, copies beyond every cache, gathers of a few megabytes, what a gather of one element
/// takes, and host_bytes_per_s(). 0 for the link to a device, which they have not.
engine::MetaRates measure_rates(int num_ranks, engine::DType dtype);
/// Bytes that the threads of one of `num_ranks` ranks read and write in a second, all of them
/// together, while those of all ranks copy: as many as updates of what is offloaded have, the
/// `num_cores` shared out, one at least.
double host_bytes_per_s(int num_ranks, int num_cores);
/// How many ranks measure_rates() is given: one for each core, at least the 2 that it takes to send
/// something, at most 8.
int num_rated_ranks(int num_cores);

/// "--rates.gflops=143 --rates.memory_gbs=11.2 --rates.link_gbs=4.7 --rates.link_latency_us=21
/// --rates.host_link_gbs=12 --rates.host_memory_gbs=11.3", without what is 0.
std::string rates_flags(const engine::MetaRates& rates);

}  // namespace tessera::tools
