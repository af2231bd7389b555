#include "tools/config/rates_config.h"

#include "engine/error.h"

namespace tessera::tools {

namespace {

// Of one GPU: "NVIDIA H100 Tensor Core GPU" (data sheet), H100 SXM. Products of bf16 are stated
// with sparsity, at twice what dense ones have; those of f32 are made without TF32. NVLink is
// stated in both directions.
engine::MetaRates h100_rates(engine::DType dtype) {
  return {.flops_per_s = dtype == engine::DType::kF32 ? 67e12 : 1'979e12 / 2,
          .bytes_per_s = 3.35e12,
          .link_bytes_per_s = 900e9 / 2};
}

}  // namespace

void RatesConfig::add_to(FlagSet& flags) {
  const auto rate = [&](const char* name, double* field, const char* help, bool or_zero = false) {
    flags.add(name, field, {.help = help, .min = 1e-9, .max = 1e18, .or_zero = or_zero});
  };
  rate("rates.gflops", &gflops,
       "GFLOP/s of one rank, for simulated times; 0: of the device: 100, as of a core, and on GPUs "
       "what NVIDIA's data sheet says of an H100 SXM, dense: 989500 in bf16, 67000 in f32",
       /*or_zero=*/true);
  rate(
      "rates.memory_gbs", &memory_gbs,
      "GB/s of memory, read and written; 0: of the device: 10, and on GPUs 3350, as of an H100 SXM",
      /*or_zero=*/true);
  rate("rates.link_gbs", &link_gbs,
       "GB/s that a rank sends; 0: of the device: 10, and on GPUs 450, as of an H100 SXM over "
       "NVLink",
       /*or_zero=*/true);
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

engine::MetaRates RatesConfig::rates(bool on_gpus, engine::DType dtype) const {
  engine::MetaRates rates;
  if (on_gpus) rates = h100_rates(dtype);
  if (gflops > 0) rates.flops_per_s = gflops * 1e9;
  if (memory_gbs > 0) rates.bytes_per_s = memory_gbs * 1e9;
  if (link_gbs > 0) rates.link_bytes_per_s = link_gbs * 1e9;
  rates.link_latency_s = link_latency_us * 1e-6;
  rates.host_link_bytes_per_s = host_link_gbs * 1e9;
  rates.host_bytes_per_s = host_memory_gbs * 1e9;
  return rates;
}

}  // namespace tessera::tools
