// What a GPU reaches in a moment, as far as our own kernels and copies show it.
#pragma once

#include <cstdint>

namespace tessera::tools {

struct GpuRates {
  double f32_gflop_per_s = 0;  ///< of a matrix product
  double bf16_gflop_per_s = 0;
  double copy_gb_per_s = 0;    ///< from its memory to its memory; bytes read and bytes written
  double add_gb_per_s = 0;     ///< y += x, the same
  double pinned_gb_per_s = 0;  ///< from page-locked memory of the host; bytes that go there
};

/// Products of normal (side, side) matrices; copies and additions of 16 side^2 bytes. Medians of
/// `num_samples`, with all that the GPU needs for them on a stream of its own. Throws DeviceError.
GpuRates measure_gpu(int gpu, std::int64_t side, std::int64_t num_samples);

/// The side, a power of two from 128 to `most`, of which an f32 product takes a few milliseconds:
/// so that a measurement is bounded on any GPU.
std::int64_t quick_side(int gpu, std::int64_t most = 4096);

}  // namespace tessera::tools
