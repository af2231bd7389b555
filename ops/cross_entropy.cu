#include <algorithm>
#include <limits>
#include <type_traits>

#include "engine/cuda_launch.cuh"
#include "ops/cross_entropy_cuda.h"
#include "ops/exp2.cuh"
#include "ops/mma.cuh"
#include "ops/vector_access.cuh"

namespace tessera::ops {

using engine::BFloat16;
using engine::DeviceMatrix;
using engine::DType;
using engine::store_f32;
using engine::Stream;
using engine::to_f32;

namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kPerThread = 8;  // neighbours, whether they can be read at once or not: so the bits
                               // do not depend on the alignment of a row
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// What a kernel knows of the rows it works on. Row blockIdx.x of it belongs to the block.
struct RowArguments {
  const std::int32_t* targets;
  RowStats* stats;
  int vocab_size;
  std::int32_t ignore_index;

  __device__ bool is_valid(std::int32_t target) const { return target >= 0 && target < vocab_size; }
};

// Elements that do not exist read as -inf.
template <bool kAligned, class T>
__device__ void load(const T* src, int count, float (&x)[kPerThread]) {
  if (count >= kPerThread) return read_vector<kPerThread, kAligned>(x, src);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) x[k] = k < count ? to_f32(src[k]) : -kInfinity;
}

template <bool kAligned, class T>
__device__ void store(T* dst, int count, const float (&x)[kPerThread], bool accumulate) {
  if (count >= kPerThread) return write_vector<kPerThread, kAligned>(dst, x, accumulate);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k)
    if (k < count) store_f32(dst[k], accumulate ? to_f32(dst[k]) + x[k] : x[k]);
}

constexpr float kLog2E = 1.44269504f;

// factor exp(x - max), factor > 0. Of bf16 logits, which are rounded by up to 2^-8 of themselves,
// to a few units of f32's last place, in two instructions: expf itself would take twice the time
// that the logits take to move.
template <class T>
class Exponential {
 public:
  __device__ explicit Exponential(float max, float factor = 1)
      : max_(max), factor_(factor), shift_(log2f(factor) - max * kLog2E) {}
  __device__ float operator()(float x) const {
    if constexpr (std::is_same_v<T, float>) {
      return expf(x - max_) * factor_;
    } else {
      return exp2_approx(fmaf(x, kLog2E, shift_));
    }
  }

 private:
  float max_, factor_, shift_;
};

// The sum of a part of a row in terms of another maximum. A part without elements has max -inf and
// sum 0.
__device__ float sum_relative_to(RowStats part, float max) {
  return part.max == max ? part.sum : part.sum * expf(part.max - max);
}

// reduce(all x) of a warp, for each of its threads.
template <class Reduce>
__device__ float reduce_warp(float x, Reduce reduce) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2)
    x = reduce(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}

struct Largest {  // of a number and NaN, the number
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Added {
  __device__ float operator()(float a, float b) const { return a + b; }
};

__device__ RowStats combine_warp(RowStats part) {
  const float max = reduce_warp(part.max, Largest());  // where one is NaN, the sum is
  return {max, reduce_warp(sum_relative_to(part, max), Added())};
}

// Every thread gets the same.
__device__ RowStats combine_block(RowStats part) {
  __shared__ RowStats warps[kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  part = combine_warp(part);
  if (lane == 0) warps[warp] = part;
  __syncthreads();
  const bool exists = lane < static_cast<int>(blockDim.x) / kWarp;
  return combine_warp(exists ? warps[lane] : RowStats{-kInfinity, 0.0f});
}

// One pass over the row: the largest so far, and the sum relative to it.
template <bool kAligned, class T>
__device__ RowStats row_stats(const T* logits, int vocab_size) {
  RowStats part{-kInfinity, 0.0f};
  const int step = static_cast<int>(blockDim.x) * kPerThread;
  for (int v = static_cast<int>(threadIdx.x) * kPerThread; v < vocab_size; v += step) {
    float x[kPerThread];
    load<kAligned>(logits + v, vocab_size - v, x);
    float max = part.max;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) max = fmaxf(max, x[k]);
    float sum = sum_relative_to(part, max);
    const Exponential<T> exponential(max == -kInfinity ? 0.0f : max);  // -inf - -inf is none
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) sum += exponential(x[k]);
    part = {max, sum};
  }
  return combine_block(part);
}

// dlogits = (or +=) scale (exp(logits - max) / sum - onehot). A thread reads what it writes first.
template <bool kAligned, bool kPadded = false, class T>
__device__ void row_gradient(T* dlogits, const T* logits, int vocab_size, RowStats stats,
                             std::int32_t target, float scale, bool accumulate) {
  const Exponential<T> probability(stats.max, 1 / stats.sum);
  const int step = static_cast<int>(blockDim.x) * kPerThread;
#pragma unroll 2
  for (int v = static_cast<int>(threadIdx.x) * kPerThread; v < vocab_size; v += step) {
    float x[kPerThread];
    load<kAligned>(logits + v, kPadded ? kPerThread : vocab_size - v, x);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) x[k] = probability(x[k]) * scale;
    if (static_cast<unsigned>(target - v) < kPerThread) {
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) x[k] = v + k == target ? x[k] - scale : x[k];
    }
    store<kAligned>(dlogits + v, vocab_size - v, x, accumulate);
  }
}

template <bool kAligned, class T>
__device__ void clear_row(T* dlogits, int vocab_size) {
  const float zeros[kPerThread] = {};
  const int step = static_cast<int>(blockDim.x) * kPerThread;
  for (int v = static_cast<int>(threadIdx.x) * kPerThread; v < vocab_size; v += step)
    store<kAligned>(dlogits + v, vocab_size - v, zeros, /*accumulate=*/false);
}

// `logits` and `dlogits` may be the same memory. The second pass over a row finds it in the L2
// cache: those of all blocks that run at one time, 26 MB of GPT-2's in bf16 on an H100, fit.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    forward_kernel(RowArguments rows, const T* logits, std::int64_t ld, float* row_losses,
                   T* dlogits, std::int64_t dlogits_ld) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t target = rows.targets[row];
  const bool leads = threadIdx.x == 0;
  logits += row * ld;
  dlogits += row * dlogits_ld;
  if (target == rows.ignore_index) {
    if (leads) rows.stats[row] = {0.0f, 1.0f}, row_losses[row] = 0.0f;
    if (dlogits_ld > 0) clear_row<kAligned>(dlogits, rows.vocab_size);
    return;
  }
  const bool valid = rows.is_valid(target);
  const double chosen = leads && valid ? double{to_f32(logits[target])} : 0.0;
  RowStats stats = row_stats<kAligned>(logits, rows.vocab_size);  // a barrier is in here
  if (!valid) stats = {kNaN, kNaN};
  if (leads) {
    rows.stats[row] = stats;
    row_losses[row] = static_cast<float>(::log(double{stats.sum}) + stats.max - chosen);
  }
  if (dlogits_ld > 0) {
    row_gradient<kAligned>(dlogits, logits, rows.vocab_size, stats, target, 1.0f,
                           /*accumulate=*/false);
  }
}

// [Note: rows in shared memory]
// Each block of forward_kernel reads, waits for all of its threads, and writes: while they wait it
// moves nothing, and two blocks, as many as fit, do not keep the memory busy. So where two rows fit
// an SM's shared memory, a block works on one while the next is on its way. A thread reads nothing
// but what it has copied itself: it waits for others in the maximum and the sum alone. As the row
// is at hand, these are taken one after the other: a sum whose maximum may change takes twice as
// many instructions, and they, not the memory, would bound the kernel.

// Of one row. With the block's own memory, two rows are all that fits an SM of an H100.
constexpr int kStreamedNbytes = 111 << 10;
constexpr int kStreamedBlocks = 132;  // one for each SM of an H100

// reduce(all x), for every thread. `warps` may be written again after the block's next barrier.
template <class Reduce>
__device__ float reduce_block(float x, float none, float (&warps)[kWarp], Reduce reduce) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  x = reduce_warp(x, reduce);
  if (lane == 0) warps[warp] = x;
  __syncthreads();
  return reduce_warp(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : none, reduce);
}

// The largest number that this thread finds in a padded row.
template <class T>
__device__ float largest_of_row(const T* row, int vocab_size) {
  float max = -kInfinity;
  [[maybe_unused]] std::uint32_t pair = pack_bf16(max, max);
  const int step = static_cast<int>(blockDim.x) * kPerThread;
#pragma unroll 2
  for (int v = static_cast<int>(threadIdx.x) * kPerThread; v < vocab_size; v += step) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const uint4 w = load_vector<kPerThread, true>(row + v).words;
      pair = max_bf16(pair, max_bf16(max_bf16(w.x, w.y), max_bf16(w.z, w.w)));
    } else {
      float x[kPerThread];
      read_vector<kPerThread, true>(x, row + v);
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) max = fmaxf(max, x[k]);
    }
  }
  return fmaxf(max, fmaxf(low_bf16(pair), high_bf16(pair)));
}

// This thread's part of the sum of exp(x - max) over a padded row.
template <class T>
__device__ float sum_of_row(const T* row, int vocab_size, float max) {
  const Exponential<T> exponential(max == -kInfinity ? 0.0f : max);  // -inf - -inf is none
  float even = 0, odd = 0;
  const int step = static_cast<int>(blockDim.x) * kPerThread;
#pragma unroll 2
  for (int v = static_cast<int>(threadIdx.x) * kPerThread; v < vocab_size; v += step) {
    float x[kPerThread];
    read_vector<kPerThread, true>(x, row + v);
#pragma unroll
    for (int k = 0; k < kPerThread; k += 2) {
      even += exponential(x[k]);
      odd += exponential(x[k + 1]);
    }
  }
  return even + odd;
}

template <class T>
__device__ void fetch_row(T* to, const T* logits, int vocab_size) {
  const int step = static_cast<int>(blockDim.x) * kPerThread;
  constexpr int kPer16 = 16 / static_cast<int>(sizeof(T));
  for (int v = static_cast<int>(threadIdx.x) * kPerThread; v < vocab_size; v += step) {
#pragma unroll
    for (int k = 0; k < kPerThread; k += kPer16) cp_async_16(to + v + k, logits + v + k);
  }
}

// Ends a row with -inf up to a multiple of what a thread takes at once, by the thread that fetched
// the end: a padded row.
template <class T>
__device__ void pad_row(T* row, int vocab_size) {
  const int end = vocab_size % kPerThread;
  const auto owner = static_cast<unsigned>(vocab_size / kPerThread) % blockDim.x;
  if (end == 0 || threadIdx.x != owner) return;
  for (int k = end; k < kPerThread; ++k) engine::store_f32(row[vocab_size - end + k], -kInfinity);
}

// forward_kernel with rows aligned, and a gradient. Rows are as long in memory as is fetched of
// them.
template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    streamed_forward_kernel(RowArguments rows, std::int64_t num_rows, const T* logits,
                            std::int64_t ld, float* row_losses, T* dlogits,
                            std::int64_t dlogits_ld) {
  constexpr int kNumel = kStreamedNbytes / static_cast<int>(sizeof(T));
  T* const memory = engine::dynamic_shared<T>();
  const bool leads = threadIdx.x == 0;
  fetch_row(memory, logits + blockIdx.x * ld, rows.vocab_size);
  cp_async_commit();
  __shared__ float maxima[kWarp], sums[kWarp];
  unsigned number = 0;
  for (std::int64_t row = blockIdx.x; row < num_rows; row += gridDim.x, ++number) {
    const std::int64_t next = row + gridDim.x;
    if (next < num_rows)
      fetch_row(memory + (number + 1) % 2 * kNumel, logits + next * ld, rows.vocab_size);
    cp_async_commit();
    cp_async_wait<1>();
    T* const here = memory + number % 2 * kNumel;
    pad_row(here, rows.vocab_size);
    const std::int32_t target = rows.targets[row];
    if (target == rows.ignore_index) {
      if (leads) rows.stats[row] = {0.0f, 1.0f}, row_losses[row] = 0.0f;
      clear_row<true>(dlogits + row * dlogits_ld, rows.vocab_size);
      continue;
    }
    RowStats stats;
    stats.max = reduce_block(largest_of_row(here, rows.vocab_size), -kInfinity, maxima, Largest());
    const bool valid = rows.is_valid(target);
    // Between two barriers: after the first every part of the row is there, after the second the
    // next one may be on its way to where it is.
    const float chosen = leads && valid ? to_f32(here[target]) : 0.0f;
    stats.sum = reduce_block(sum_of_row(here, rows.vocab_size, stats.max), 0.0f, sums, Added());
    if (!valid) stats = {kNaN, kNaN};
    if (leads) {  // and all others wait at the next barrier: so nothing is computed in double
      rows.stats[row] = stats;
      row_losses[row] = logf(stats.sum) + (stats.max - chosen);
    }
    row_gradient<true, true>(dlogits + row * dlogits_ld, here, rows.vocab_size, stats, target, 1.0f,
                             /*accumulate=*/false);
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    gradient_kernel(RowArguments rows, const T* logits, std::int64_t ld, T* dlogits,
                    std::int64_t dlogits_ld, RowScales scales, bool accumulate) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t target = rows.targets[row];
  logits += row * ld;
  dlogits += row * dlogits_ld;
  if (target == rows.ignore_index) {
    if (!accumulate) clear_row<kAligned>(dlogits, rows.vocab_size);
    return;
  }
  row_gradient<kAligned>(dlogits, logits, rows.vocab_size, rows.stats[row], target,
                         scales.data[row * scales.step], accumulate);
}

// One block. Each thread adds up every blockDim.x-th row, then halves add up.
__global__ void __launch_bounds__(kMaxThreads)
    mean_kernel(const std::int32_t* targets, std::int32_t ignore_index, const float* row_losses,
                std::int64_t count, bool is_sum, float* loss, float* weight) {
  __shared__ double sums[kMaxThreads];
  __shared__ long long counts[kMaxThreads];
  const int thread = static_cast<int>(threadIdx.x);
  double sum = 0;
  long long counted = 0;
  for (std::int64_t i = thread; i < count; i += blockDim.x) {
    sum += double{row_losses[i]};
    counted += targets[i] != ignore_index ? 1 : 0;
  }
  sums[thread] = sum, counts[thread] = counted;
  for (int half = static_cast<int>(blockDim.x) / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half], counts[thread] += counts[thread + half];
  }
  if (thread != 0) return;
  double each = 1.0;
  if (!is_sum) each = counts[0] == 0 ? 0.0 : 1.0 / static_cast<double>(counts[0]);
  *loss = static_cast<float>(sums[0] * each);
  *weight = static_cast<float>(each);
}

__global__ void scales_kernel(const float* dloss, const float* weight, float* scales) {
  scales[0] = *dloss * *weight;
  scales[1] = 0.0f;
  scales[2] = 1.0f;
}

RowArguments arguments(const CrossEntropyRows& rows, std::int64_t first) {
  return {rows.targets.data<std::int32_t>() + first, &rows.row_stats(first),
          static_cast<int>(rows.vocab_size), rows.ignore_index};
}

engine::LaunchShape shape(const DeviceMatrix& logits) {
  const std::int64_t threads = (logits.cols + kPerThread - 1) / kPerThread;
  const std::int64_t warps = std::min<std::int64_t>((threads + kWarp - 1) / kWarp, kWarp);
  return {.grid = dim3(static_cast<unsigned>(logits.rows)),
          .block = dim3(static_cast<unsigned>(warps * kWarp))};
}

// May rows be read as vectors?
bool has_aligned_rows(const DeviceMatrix& m) {
  return m.ld % kPerThread == 0 && engine::dispatch_float(m.dtype, "cross_entropy", [&](auto t) {
           return are_aligned<kPerThread>(static_cast<const decltype(t)*>(m.data));
         });
}

// Whether a block of the GPU may have the memory of streamed_forward_kernel.
class StreamedRoom {
 public:
  explicit StreamedRoom(const Stream& stream) {
    int nbytes = 0;
    engine::check_cuda(cudaDeviceGetAttribute(&nbytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                              stream.device().index),
                       "cudaDeviceGetAttribute");
    constexpr int kOwnNbytes = 4 << 10;  // a bound of what the kernel has besides
    is_there_ = nbytes >= 2 * kStreamedNbytes + kOwnNbytes;
  }
  explicit operator bool() const { return is_there_; }

 private:
  bool is_there_;
};

// Calls fn(T{}, aligned).
template <class F>
void dispatch(const DeviceMatrix& logits, const DeviceMatrix& dlogits, F fn) {
  engine::dispatch_float(logits.dtype, "cross_entropy", [&](auto t) {
    if (has_aligned_rows(logits) && has_aligned_rows(dlogits)) return fn(t, std::true_type{});
    fn(t, std::false_type{});
  });
}

}  // namespace

void cross_entropy_forward_cuda(const Stream& stream, const CrossEntropyRows& rows,
                                std::int64_t first, const DeviceMatrix& logits, float* row_losses,
                                const DeviceMatrix* dlogits) {
  const DeviceMatrix gradient =
      dlogits != nullptr ? *dlogits : DeviceMatrix{.data = nullptr, .dtype = logits.dtype};
  dispatch(logits, gradient, [&](auto t, auto aligned) {
    using T = decltype(t);
    constexpr bool kAligned = decltype(aligned)::value;
    const std::int64_t fetched = (rows.vocab_size + kPerThread - 1) / kPerThread * kPerThread;
    if (kAligned && dlogits != nullptr && !stream.device().is_meta && logits.ld >= fetched &&
        fetched * static_cast<std::int64_t>(sizeof(T)) <= kStreamedNbytes &&
        logits.rows > kStreamedBlocks && stream.state<StreamedRoom>()) {
      engine::LaunchShape streamed = shape(logits);
      streamed.grid = dim3(kStreamedBlocks);
      streamed.shared_nbytes = 2 * kStreamedNbytes;
      return engine::launch_kernel(stream, streamed, streamed_forward_kernel<T>,
                                   arguments(rows, first), logits.rows,
                                   static_cast<const T*>(logits.data), logits.ld, row_losses,
                                   static_cast<T*>(gradient.data), gradient.ld);
    }
    engine::launch_kernel(stream, shape(logits), forward_kernel<T, kAligned>,
                          arguments(rows, first), static_cast<const T*>(logits.data), logits.ld,
                          row_losses, static_cast<T*>(gradient.data), gradient.ld);
  });
}

void cross_entropy_gradient_cuda(const Stream& stream, const CrossEntropyRows& rows,
                                 const DeviceMatrix& logits, const DeviceMatrix& dlogits,
                                 const RowScales& scales, bool accumulate) {
  dispatch(logits, dlogits, [&](auto t, auto aligned) {
    using T = decltype(t);
    engine::launch_kernel(stream, shape(logits), gradient_kernel<T, decltype(aligned)::value>,
                          arguments(rows, 0), static_cast<const T*>(logits.data), logits.ld,
                          static_cast<T*>(dlogits.data), dlogits.ld, scales, accumulate);
  });
}

void cross_entropy_mean_cuda(const Stream& stream, const CrossEntropyRows& rows,
                             const float* row_losses, float* loss) {
  int threads = kWarp;
  while (threads < kMaxThreads && threads < rows.count()) threads *= 2;
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(static_cast<unsigned>(threads))},
                        mean_kernel, rows.targets.data<std::int32_t>(), rows.ignore_index,
                        row_losses, rows.count(), rows.is_sum, loss, rows.weight.data<float>());
}

void cross_entropy_scales_cuda(const Stream& stream, const CrossEntropyRows& rows,
                               const float* dloss, float* scales) {
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(1)}, scales_kernel, dloss,
                        rows.weight.data<float>(), scales);
}

}  // namespace tessera::ops
