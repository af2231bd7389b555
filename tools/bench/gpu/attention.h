// Attention on a GPU by each of the kernels that there are for it.
#pragma once

#include <functional>
#include <vector>

#include "tools/bench/gpu/device.h"
#include "tools/bench/report.h"
#include "tools/bench/training/training.h"

namespace tessera::tools {

/// A layer's attention of `rows`, in bf16, causal, with the heads of the model and with half as
/// many of twice the size: forward and backward by mma.sync and by wgmma, in turn, medians of
/// `num_samples`, and how far their results are apart. Says so where the GPU has no wgmma. Ends
/// when `is_late`. Throws InvalidArgument, after the last row, where results are further apart
/// than roundings to bf16.
void measure_attention(const std::vector<TrainingRow>& rows, std::int64_t num_samples,
                       const Ceilings& ceilings, const std::function<bool()>& is_late,
                       BenchReport& report);

}  // namespace tessera::tools
