#include "tools/train/rates_config.h"

#include "engine/error.h"

namespace tessera::tools {

namespace {

// Of one GPU: "NVIDIA H100 Tensor Core GPU" (data sheet), H100 SXM. Products of bf16 are stated
// with sparsity, at twice what dense ones have; those of f32 are made without TF32. NVLink is
// stated in both directions.
constexpr double kH100Bf16Gflops = 1'979'000 / 2.0, kH100F32Gflops = 67'000;
constexpr double kH100MemoryGbs = 3'350, kH100LinkGbs = 900 / 2.0;

}  // namespace

void RatesConfig::add_to(FlagSet& flags) {
  const auto rate = [&](const char* name, double* field, const char* help) {
    flags.add(name, field, {.help = help, .min = 1e-9, .max = 1e18});
  };
  rate("rates.gflops", &gflops,
       "GFLOP/s of one rank, for simulated times; the default is a core's; on GPUs it is what "
       "NVIDIA's data sheet says of an H100 SXM, dense: 989500 in bf16, 67000 in f32");
  rate("rates.memory_gbs", &memory_gbs,
       "GB/s of memory, read and written; on GPUs by default 3350, as of an H100 SXM");
  rate("rates.link_gbs", &link_gbs,
       "GB/s that a rank sends; on GPUs by default 450, as of an H100 SXM over NVLink");
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

void RatesConfig::choose(const FlagSet& flags, bool on_gpus, engine::DType dtype) {
  if (!on_gpus) return;
  const auto set = [&](const char* name, double& field, double value) {
    if (!flags.is_given(name)) field = value;
  };
  set("rates.gflops", gflops, dtype == engine::DType::kF32 ? kH100F32Gflops : kH100Bf16Gflops);
  set("rates.memory_gbs", memory_gbs, kH100MemoryGbs);
  set("rates.link_gbs", link_gbs, kH100LinkGbs);
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
