// What the machine can do at most, measured in the same run as what we do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "engine/dtype.h"

namespace tessera::tools {

/// f32 multiplications and additions of one thread in registers, at the instruction set of
/// engine/isa.h: the best of many short tries, in GFLOP/s. More
/// samples are surer: each of 7 ways takes about 5 ms a sample.
double peak_gflop_per_s(std::int64_t num_samples = 11);
/// What `measure` says of peak_gflop_per_s(): measured once, and while it is below the
/// `product_gflop_per_s` that the same thread reached, which other programs make it, up to three
/// times more. The largest.
double settled_peak(double product_gflop_per_s, const std::function<double()>& measure);
/// Our matrix product of a block's size, one thread, operands of `dtype` with f32 results: the best
/// of some tries, in GFLOP/s.
double product_gflop_per_s(engine::DType dtype, std::int64_t num_samples = 11);
/// Bytes that one thread's memcpy reads and writes, of blocks beyond every cache: the best of some
/// tries, in GB/s.
double copy_gb_per_s(std::size_t nbytes = std::size_t{256} << 20);

}  // namespace tessera::tools
