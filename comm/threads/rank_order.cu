#include <algorithm>
#include <cstddef>

#include "comm/threads/rank_order.h"
#include "engine/cuda_launch.cuh"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::Packed;
using engine::Stream;
using engine::to_f32;

constexpr int kMaxIns = 64;

// By value: a kernel finds its peers' memory in its arguments.
template <class T>
struct Pointers {
  const T* ins[kMaxIns];
  float* outs[kMaxGpuOuts];
  const float* start;  // or null
  int num_ins;
  int num_outs;
};

// A thread folds kNumel neighbours over all ranks. Their loads do not wait for each other; the
// additions do, and are far cheaper.
template <class T, int kNumel, class Load, class Store>
__device__ void fold(const Pointers<T>& p, const Load& load, const Store& store) {
  float acc[kNumel];
  load(acc, p.start != nullptr ? nullptr : p.ins[0], p.start);
#pragma unroll 8
  for (int r = p.start != nullptr ? 0 : 1; r < p.num_ins; ++r) {
    float x[kNumel];
    load(x, p.ins[r], nullptr);
#pragma unroll
    for (int k = 0; k < kNumel; ++k) acc[k] += x[k];
  }
  for (int o = 0; o < p.num_outs; ++o) store(p.outs[o], acc);
}

template <class T, bool kPackable>
__global__ void sum_kernel(Pointers<T> p, std::int64_t numel) {
  constexpr int kNumel = kPackable ? Packed<T>::kNumel : 1;
  for (std::int64_t i = engine::stride_begin() * kNumel; i < numel;
       i += engine::stride_step() * kNumel) {
    const auto fold_one = [&](std::int64_t j) {
      fold<T, 1>(
          p,
          [j](float* x, const T* in, const float* start) {
            x[0] = start != nullptr ? start[j] : to_f32(in[j]);
          },
          [j](float* out, const float* acc) { out[j] = acc[0]; });
    };
    if constexpr (!kPackable) {
      fold_one(i);
    } else if (i + kNumel > numel) {
      for (std::int64_t j = i; j < numel; ++j) fold_one(j);
    } else {
      constexpr int kWide = Packed<float>::kNumel;
      fold<T, kNumel>(
          p,
          [i](float* x, const T* in, const float* start) {
            if (start != nullptr) {
#pragma unroll
              for (int k = 0; k < kNumel; k += kWide) {
                const auto wide = Packed<float>::load(start + i + k);
#pragma unroll
                for (int l = 0; l < kWide; ++l) x[k + l] = wide.values[l];
              }
            } else {
              const auto wide = Packed<T>::load(in + i);
#pragma unroll
              for (int k = 0; k < kNumel; ++k) x[k] = to_f32(wide.values[k]);
            }
          },
          [i](float* out, const float* acc) {
#pragma unroll
            for (int k = 0; k < kNumel; k += kWide) {
              Packed<float> wide;
#pragma unroll
              for (int l = 0; l < kWide; ++l) wide.values[l] = acc[k + l];
              wide.store(out + i + k);
            }
          });
    }
  }
}

template <class T>
void sum(const Stream& stream, std::span<const void* const> ins, const float* start,
         std::span<float* const> outs, std::int64_t numel) {
  Pointers<T> p{};
  bool packable = engine::are_packable(start);
  p.start = start;
  for (const void* in : ins) {
    packable = packable && engine::are_packable(static_cast<const T*>(in));
    p.ins[p.num_ins++] = static_cast<const T*>(in);
  }
  for (float* out : outs) {
    packable = packable && engine::are_packable(out);
    p.outs[p.num_outs++] = out;
  }
  constexpr int kPacked = Packed<T>::kNumel;
  if (packable) {
    engine::launch_kernel(stream, engine::stride_shape((numel + kPacked - 1) / kPacked),
                          sum_kernel<T, true>, p, numel);
  } else {
    engine::launch_kernel(stream, engine::stride_shape(numel), sum_kernel<T, false>, p, numel);
  }
}

}  // namespace

void sum_in_rank_order_on_gpu(const Stream& stream, engine::DType dtype,
                              std::span<const void* const> ins, const float* start,
                              std::span<float* const> outs, std::int64_t numel) {
  engine::require(outs.size() <= kMaxGpuOuts,
                  "[sum_in_rank_order] expected at most {} outs, got {}", kMaxGpuOuts, outs.size());
  engine::dispatch_float(dtype, "sum_in_rank_order", [&](auto t) {
    while (!ins.empty()) {
      const auto now = ins.first(std::min<std::size_t>(ins.size(), kMaxIns));
      sum<decltype(t)>(stream, now, start, outs, numel);
      ins = ins.subspan(now.size());
      start = outs[0];  // where the fold has got to
    }
  });
}

}  // namespace tessera::comm
