#include "tools/train/rates_config.h"

#include "engine/error.h"

namespace tessera::tools {

void RatesConfig::add_to(FlagSet& flags) {
  const auto rate = [&](const char* name, double* field, const char* help) {
    flags.add(name, field, {.help = help, .min = 1e-9, .max = 1e18});
  };
  rate("rates.gflops", &gflops, "GFLOP/s of one rank, for simulated times");
  rate("rates.memory_gbs", &memory_gbs, "GB/s of memory, read and written");
  rate("rates.link_gbs", &link_gbs, "GB/s that a rank sends");
  flags.add("rates.link_latency_us", &link_latency_us,
            {.help = "microseconds of each collective", .min = 0, .max = 1e12});
  rate("rates.host_link_gbs", &host_link_gbs,
       "GB/s of copies between a device and its host, each way, as offload makes them");
  rate("rates.host_memory_gbs", &host_memory_gbs,
       "GB/s of the host's memory that updates there have, all threads of a rank together");
}

void RatesConfig::check_unused(const FlagSet& flags) {
  for (const char* name :
       {"rates.gflops", "rates.memory_gbs", "rates.link_gbs", "rates.link_latency_us",
        "rates.host_link_gbs", "rates.host_memory_gbs"}) {
    engine::require(!flags.is_given(name),
                    "[config] expected {} with plan, audit or memory_budget only, got it without",
                    name);
  }
}

engine::MetaRates RatesConfig::rates() const {
  return {.flops_per_s = gflops * 1e9,
          .bytes_per_s = memory_gbs * 1e9,
          .link_bytes_per_s = link_gbs * 1e9,
          .link_latency_s = link_latency_us * 1e-6,
          .host_link_bytes_per_s = host_link_gbs * 1e9,
          .host_bytes_per_s = host_memory_gbs * 1e9};
}

}  // namespace tessera::tools
