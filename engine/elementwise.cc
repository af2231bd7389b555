#include "engine/elementwise.h"

#include <iterator>
#include <utility>
#include <vector>

#include "engine/cuda.h"

namespace tessera::engine {

namespace {

void check_numel(const Tensor& dst, const Tensor& src) {
  require(dst.numel() == src.numel(), "[assign_or_add] expected {} elements, got {} ({} to {})",
          dst.numel(), src.numel(), src.name(), dst.name());
}

void assign_or_add_bytes(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype,
                         std::int64_t numel, bool accumulate) {
  dispatch_float(dst_dtype, "assign_or_add", [&](auto t) {
    dispatch_float(src_dtype, "assign_or_add", [&](auto s) {
      assign_or_add(reinterpret_cast<decltype(t)*>(dst), reinterpret_cast<const decltype(s)*>(src),
                    numel, accumulate);
    });
  });
}

}  // namespace

void assign_or_add(const Tensor& dst, const Tensor& src, bool accumulate) {
  check_numel(dst, src);
  with_isa([&] {
    assign_or_add_bytes(dst.raw(), dst.dtype(), src.raw(), src.dtype(), dst.numel(), accumulate);
  });
}

void cast(const Tensor& dst, const Tensor& src) { assign_or_add(dst, src, false); }

void fill_zero(const Tensor& dst) {
  std::memset(dst.raw(), 0, static_cast<std::size_t>(dst.nbytes()));
}

void launch_assign_or_add(const Stream& stream, const Tensor& dst, const Tensor& src,
                          bool accumulate, std::string_view name, std::string detail) {
  check_numel(dst, src);
  stream.launch(
      {.name = name,
       .flops = accumulate ? static_cast<double>(dst.numel()) : 0,
       .bytes_read = src.nbytes() + (accumulate ? dst.nbytes() : 0),
       .bytes_written = dst.nbytes(),
       .detail = std::move(detail)},
      [dst, src, to = dst.raw(), from = src.raw(), accumulate] {
        assign_or_add_bytes(to, dst.dtype(), from, src.dtype(), dst.numel(), accumulate);
      },
      [&](const auto& cuda_stream) {
        cuda::assign_or_add(cuda_stream, dst.raw(), dst.dtype(), src.raw(), src.dtype(),
                            dst.numel(), accumulate);
      });
}

void launch_set(const Stream& stream, const Tensor& dst, float value, std::string_view name) {
  stream.launch(
      {.name = name, .bytes_written = dst.nbytes()},
      [dst, value] {
        dispatch_float(dst.dtype(), "set", [&](auto t) {
          for (auto& x : dst.span<decltype(t)>()) store_f32(x, value);
        });
      },
      [&](const auto& cuda_stream) {
        cuda::set(cuda_stream, dst.raw(), dst.dtype(), dst.numel(), value);
      });
}

void launch_store(const Stream& stream, const Tensor& dst, std::span<const std::byte> data,
                  std::string_view name) {
  require(std::ssize(data) == dst.nbytes(), "[store] expected {} bytes, got {} ({})", dst.nbytes(),
          data.size(), dst.name());
  stream.launch(
      {.name = name, .bytes_written = dst.nbytes()},
      [dst, to = dst.raw(), copied = std::vector(data.begin(), data.end())] {
        std::memcpy(to, copied.data(), copied.size());
      },
      [&](const auto& cuda_stream) { cuda::store(cuda_stream, dst.raw(), data); });
}

void launch_fill(const Stream& stream, const Tensor& dst, int byte, std::string_view name,
                 std::string detail) {
  stream.launch(
      {.name = name, .bytes_written = dst.nbytes(), .detail = std::move(detail)},
      [dst, to = dst.raw(), byte] {
        std::memset(to, byte, static_cast<std::size_t>(dst.nbytes()));
      },
      [&](const auto& cuda_stream) { cuda::fill(cuda_stream, dst.raw(), byte, dst.nbytes()); });
}

}  // namespace tessera::engine
