#include "engine/elementwise.h"

namespace tessera::engine {

void assign_or_add(const Tensor& dst, const Tensor& src, bool accumulate) {
  require(dst.numel() == src.numel(), "[assign_or_add] expected {} elements, got {} ({} to {})",
          dst.numel(), src.numel(), src.name(), dst.name());
  dispatch_float(dst.dtype(), "assign_or_add", [&](auto t) {
    dispatch_float(src.dtype(), "assign_or_add", [&](auto s) {
      assign_or_add(dst.data<decltype(t)>(), src.data<decltype(s)>(), dst.numel(), accumulate);
    });
  });
}

void cast(const Tensor& dst, const Tensor& src) { assign_or_add(dst, src, false); }

void fill_zero(const Tensor& dst) {
  std::memset(dst.raw(), 0, static_cast<std::size_t>(dst.nbytes()));
}

}  // namespace tessera::engine
