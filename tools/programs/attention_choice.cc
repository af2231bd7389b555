#include "tools/programs/attention_choice.h"

#include "engine/error.h"
#include "ops/attention.h"

namespace tessera::tools {

void check_attention(const TransformerConfig& config, bool on_gpus) {
  engine::require(on_gpus || config.cuda_attention != ops::CudaAttention::kWgmma,
                  "[config] expected cuda.attention=wgmma on GPUs only, got it where the device is "
                  "the CPU");
}

}  // namespace tessera::tools
