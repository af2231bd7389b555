#include "tools/config/device_config.h"

namespace tessera::tools {

void CpuConfig::add_to(FlagSet& flags) {
  flags.add("cpu.isa", &isa,
            {.help = "the CPU's instruction set, v2 to v4 as x86-64 counts them; auto: the best it "
                     "has, or TESSERA_CPU_ISA in the environment",
             .choices = {"auto", "v2", "v3", "v4", "v4+bf16", "v4+amx"}});
  flags.add("cpu.gemm", &gemm,
            {.help = "who multiplies matrices on the CPU; auto: oneDNN where it is installed, or "
                     "TESSERA_CPU_GEMM in the environment; split: f32 as six products of bf16, on "
                     "a CPU with AMX",
             .choices = {"auto", "onednn", "eigen", "split"}});
  flags.add("cpu.threads_per_rank", &threads_per_rank,
            {.help = "threads that each rank multiplies matrices with, on the CPU, by oneDNN; bits "
                     "may depend on their number",
             .min = 1,
             .max = 1024});
  flags.add(
      "cpu.pin", &pin,
      {.help = "each rank keeps to cores of its own, cpu.threads_per_rank of them; there must "
               "be enough"});
}

void CudaConfig::add_to(FlagSet& flags) {
  flags.add(
      "cuda.graph", &graph,
      EnumOption<GraphChoice>{
          "on a GPU, with one rank: after the first two steps each step is one launch of a "
          "CUDA graph, with the same bits; auto: on where it can be, off where something "
          "that was asked for needs the host, which the run says",
          {{"auto", GraphChoice::kAuto}, {"on", GraphChoice::kOn}, {"off", GraphChoice::kOff}}});
  flags.add("cuda.tune_gemm", &tune_gemm,
            {.help = "on GPUs: before training, time the algorithms that cublasLt proposes for "
                     "each matrix product of a step, those that do GELU or its slope as well among "
                     "them, and keep the fastest; false: take the first that is proposed, and do "
                     "GELU and its slope apart from products"});
  flags.add(
      "cuda.gemm_algorithms", &gemm_algorithms,
      {.help = "file where the algorithms that cuda.tune_gemm chose are kept, and found by later "
               "runs, which then have the same bits; default: gemm_algorithms.txt in the "
               "output folder"});
}

}  // namespace tessera::tools
