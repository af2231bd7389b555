#include "engine/dtype.h"
#include "tools/bench/parts.h"
#include "tools/machine/limits.h"
#include "tools/rates/machine_rates.h"

namespace tessera::tools {

void bench_rates(const BenchConfig& config, BenchReport& report) {
  const int num_ranks = num_rated_ranks(read_limits().usable_cores());
  report.begin_table(
      "rates",
      "What plans ask of a machine: of one thread rank while all work at once, by "
      "the dtype that is multiplied",
      {"dtype", "ranks", "gflops", "memory_gbs", "link_gbs", "link_latency_us", "host_memory_gbs"});
  for (const engine::DType dtype : {engine::DType::kF32, engine::DType::kBF16}) {
    const std::string name(name_of(dtype));
    if (!config.wants("rates " + name)) continue;
    const engine::MetaRates rates = measure_rates(num_ranks, dtype);
    report.row({name, num_ranks, rates.flops_per_s * 1e-9, Cell(rates.bytes_per_s * 1e-9, 2),
                Cell(rates.link_bytes_per_s * 1e-9, 2), rates.link_latency_s * 1e6,
                Cell(rates.host_bytes_per_s * 1e-9, 2)});
    report.note("plan --precision.param=" + name + " " + rates_flags(rates));
  }
}

}  // namespace tessera::tools
