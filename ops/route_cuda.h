// The router on CUDA streams; defined where CUDA is built. Private to ops.
#pragma once

#include "engine/stream.h"
#include "engine/tape.h"
#include "ops/route_rows.h"

namespace tessera::ops {

void route_forward_cuda(const engine::Stream& stream, const RouteView& view,
                        const engine::Tensor& logits);
void route_backward_cuda(const engine::Stream& stream, const RouteView& view,
                         const engine::GradTarget& dlogits, const float* dgates, const float* daux);

}  // namespace tessera::ops
