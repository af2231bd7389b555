#include "engine/copy.h"

#include <cstdint>
#include <cstring>

#include "engine/cuda.h"
#include "engine/dtype.h"
#include "engine/error.h"

namespace tessera::engine {

void copy(const Tensor& dst, const Tensor& src, const Stream& stream, std::string_view name) {
  require(dst.numel() == src.numel() && dst.dtype() == src.dtype(),
          "[copy] expected {} {}, got {} {} ({} to {})", name_of(dst.dtype()), dst.shape(),
          name_of(src.dtype()), src.shape(), src.name(), dst.name());
  const bool is_meta = stream.device().is_meta;
  require(is_meta == dst.device().is_meta && is_meta == src.device().is_meta,
          "[copy] expected memory and a stream of meta devices, or none of them, got {} to {} by "
          "'{}' of {} ({} to {})",
          to_string(src.device()), to_string(dst.device()), stream.name(),
          to_string(stream.device()), src.name(), dst.name());
  require(
      is_meta || stream.device().is_cuda() || (dst.device().is_host() && src.device().is_host()),
      "[copy] expected a stream of the GPU, got '{}' of {} ({} on {} to {} on {})", stream.name(),
      to_string(stream.device()), src.name(), to_string(src.device()), dst.name(),
      to_string(dst.device()));
  const bool from_host = src.buffer()->memory().is_pinned();
  const bool to_host = dst.buffer()->memory().is_pinned();
  stream.launch(
      {.name = name,
       .bytes_read = src.nbytes(),
       .bytes_written = dst.nbytes(),
       .bytes_up = from_host && !to_host ? src.nbytes() : 0,
       .bytes_down = to_host && !from_host ? src.nbytes() : 0,
       .detail = dst.name()},
      [dst, src, to = dst.raw(), from = src.raw()] {
        std::memcpy(to, from, static_cast<std::size_t>(dst.nbytes()));
      },
      [&](const auto& cuda_stream) {
        cuda::copy(cuda_stream, dst.raw(), src.raw(), dst.nbytes());
      });
}

void copy_from_floats(const Tensor& dst, std::span<const float> values) {
  dispatch_float(dst.dtype(), "copy_from_floats", [&](auto zero) {
    std::vector<decltype(zero)> converted(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) store_f32(converted[i], values[i]);
    dst.copy_from_host(converted.data(), static_cast<std::int64_t>(converted.size()));
  });
}

}  // namespace tessera::engine
