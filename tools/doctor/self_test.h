// Products, copies and collectives on this machine, for about two seconds: whether they are right,
// and how fast beside what the machine itself does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "comm/process_group.h"
#include "engine/gemm/gemm.h"
#include "tools/doctor/check.h"

namespace tessera::tools {

/// C = A B of f32, for tests to hand in a wrong one.
using Product = std::function<void(engine::MatrixView<const float> a,
                                   engine::MatrixView<const float> b, engine::MatrixView<float> c)>;
/// engine::gemm().
Product engine_product();

/// One thread's matrix product beside what it multiplies and adds in registers, and every element
/// of a product beside a sum in double. kFail if the values are wrong, kWarn below half of the
/// peak.
Check check_product(const Product& product);
/// All ranks' values of an all_gather and a reduce_scatter between `num_ranks` threads, computed
/// anew element by element, and their rate beside memcpy by as many threads. kFail if a value is
/// wrong, kWarn where they take over four times as long. `wrap` may stand between a rank and its
/// group (tests); null: nothing.
using Wrap = std::function<void(comm::ProcessGroup& world,
                                const std::function<void(comm::ProcessGroup&)>& run)>;
Checks check_collectives(int num_ranks, const Wrap& wrap = nullptr);

/// All of it, with what may be used. kWarn for what that leaves no memory for, kFail for what
/// throws.
Checks self_test(int num_cores, std::int64_t usable_nbytes);

}  // namespace tessera::tools
