#include "engine/copy.h"

#include <cstring>

#include "engine/cuda.h"
#include "engine/error.h"

namespace tessera::engine {

void copy(const Tensor& dst, const Tensor& src, const Stream& stream, std::string_view name) {
  require(dst.numel() == src.numel() && dst.dtype() == src.dtype(),
          "[copy] expected {} {}, got {} {} ({} to {})", name_of(dst.dtype()), dst.shape().str(),
          name_of(src.dtype()), src.shape().str(), src.name(), dst.name());
  require(stream.device().is_cuda() || (dst.device().is_host() && src.device().is_host()),
          "[copy] expected a stream of the GPU, got '{}' of {} ({} on {} to {} on {})",
          stream.name(), to_string(stream.device()), src.name(), to_string(src.device()),
          dst.name(), to_string(dst.device()));
  stream.launch(
      {.name = name,
       .bytes_read = src.nbytes(),
       .bytes_written = dst.nbytes(),
       .detail = dst.name()},
      [dst, src, to = dst.raw(), from = src.raw()] {
        std::memcpy(to, from, static_cast<std::size_t>(dst.nbytes()));
      },
      [&](const auto& cuda_stream) {
        cuda::copy(cuda_stream, dst.raw(), src.raw(), dst.nbytes());
      });
}

}  // namespace tessera::engine
