#include "tools/doctor/rate_lines.h"

#include <fmt/format.h>

#include "tools/rates/machine_rates.h"

namespace tessera::tools {

Check product_line(double f32, double peak, double bf16) {
  constexpr double kSlow = 0.5;
  Check check{.name = "product"};
  // A product is made in registers too, so it shows that they reach as much.
  const bool is_peak_known = f32 <= peak;
  check.found = fmt::format("values right; one thread: {:.0f} GFLOP/s in f32", f32);
  if (is_peak_known) {
    check.found += fmt::format(", {:.0f} % of the {:.0f} that it reaches in registers",
                               100 * f32 / peak, peak);
  }
  check.found += fmt::format("; {:.0f} GFLOP/s in bf16", bf16);
  check.facts.add("gflop_per_s", f32);
  if (is_peak_known) {
    check.facts.add("peak_gflop_per_s", peak);
  } else {
    check.found +=
        "; what it reaches in registers is not known, as other programs ran while it was measured";
  }
  check.facts.add("bf16_gflop_per_s", bf16);
  if (f32 < kSlow * peak) {
    check.verdict = Verdict::kWarn;
    check.fix =
        "sudo apt-get install libdnnl2, if Eigen multiplies (see products); otherwise end other "
        "programs and run this again";
  }
  return check;
}

Check collective_line(const CollectiveTime& time, bool on_gpus) {
  const double slow = on_gpus ? 0.002 : 0.25;  // PCIe has 0.01 of the rate of HBM
  const double gb_per_s = time.nbytes / time.ms * 1e-6, ratio = time.copy_ms / time.ms;
  Check check{.name = fmt::format("{}{}", on_gpus ? "gpu " : "", time.name)};
  check.found = fmt::format("{} {}: values right, {:.1f} GB/s a rank, {:.2f} of {}", time.num_ranks,
                            on_gpus ? "GPUs over NCCL" : "thread ranks", gb_per_s, ratio,
                            on_gpus ? "a copy inside each" : "memcpy by as many threads");
  check.facts.add("ranks", time.num_ranks).add("gb_per_s", gb_per_s).add("ratio_to_memcpy", ratio);
  if (ratio >= slow) return check;
  check.verdict = Verdict::kWarn;
  check.fix = on_gpus ? "nvidia-smi topo -m shows how the GPUs are linked, and NCCL_DEBUG=INFO "
                        "which of the links NCCL uses"
                      : "end other programs, or use fewer ranks than cores: ranks wait for each "
                        "other";
  return check;
}

Check rates_line(int num_ranks, const engine::MetaRates& f32) {
  Check check{.name = "rates"};
  check.found = fmt::format("for plan, {} ranks at once in f32: {}", num_ranks, rates_flags(f32));
  check.facts.add("ranks", num_ranks)
      .add("gflops", f32.flops_per_s * 1e-9)
      .add("memory_gbs", f32.bytes_per_s * 1e-9)
      .add("link_gbs", f32.link_bytes_per_s * 1e-9)
      .add("link_latency_us", f32.link_latency_s * 1e6)
      .add("host_memory_gbs", f32.host_bytes_per_s * 1e-9);
  return check;
}

}  // namespace tessera::tools
