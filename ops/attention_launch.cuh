// What launches of attention share. Private to attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "ops/attention_cuda.h"

namespace tessera::ops {

/// Can every row of every head be moved 16 bytes at a time?
template <class... T>
bool rows_are_packable(const AttentionLayout& s, const T*... pointers) {
  return s.head_size % engine::Packed<engine::BFloat16>::kNumel == 0 &&
         engine::are_packable(pointers...);
}

/// One block for each `rows` tokens of each of `heads`.
inline engine::LaunchShape tile_shape(const AttentionLayout& s, std::int64_t heads, int rows,
                                      int num_threads, std::size_t shared_nbytes) {
  const std::int64_t tiles = (s.tokens + rows - 1) / rows;
  return {.grid = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(heads),
                       static_cast<unsigned>(s.batch)),
          .block = dim3(static_cast<unsigned>(num_threads)),
          .shared_nbytes = shared_nbytes};
}

}  // namespace tessera::ops
