// What the engine asks of the CUDA runtime, without its headers. Defined where CUDA is built; call
// from code that `if constexpr (kCudaBuilt)` guards. All throw DeviceError with the failing call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/device.h"
#include "engine/dtype.h"
#include "engine/stream.h"

namespace tessera::engine::cuda {

/// GPUs of this machine that this build can use; 0 without a driver.
int num_devices();

/// Device or pinned memory, 256-byte aligned; null when there is none left.
std::byte* allocate(const Device& device, std::int64_t nbytes);
void deallocate(const Device& device, std::byte* data) noexcept;

// On a stream; at least one side of a copy is device memory.

void fill(const Stream& stream, std::byte* dst, int byte, std::int64_t nbytes);
void copy(const Stream& stream, std::byte* dst, const std::byte* src, std::int64_t nbytes);
/// dst = data, at most kMaxStored bytes, a multiple of 8, taken at the call: what a captured step
/// reads again each time is written so.
inline constexpr std::size_t kMaxStored = 1024;
void store(const Stream& stream, std::byte* dst, std::span<const std::byte> data);
/// dst[i] = value, f32 or bf16.
void set(const Stream& stream, std::byte* dst, DType dtype, std::int64_t numel, float value);
/// dst[i] = src[i] or dst[i] += src[i], f32 or bf16, any mix; one rounding an element. With
/// `scale`, a number in device memory, of src[i] times that, in f32.
void assign_or_add(const Stream& stream, std::byte* dst, DType dst_dtype, const std::byte* src,
                   DType src_dtype, std::int64_t numel, bool accumulate,
                   const float* scale = nullptr);

}  // namespace tessera::engine::cuda
