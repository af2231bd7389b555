#include "shard/split_tensor.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/copy.h"
#include "engine/error.h"
#include "shard/layout.h"

namespace tessera::shard {

using engine::Stream;
using engine::Tensor;

SplitTensor::SplitTensor(Tensor whole) : device_(std::move(whole)) {}

std::int64_t SplitTensor::host_numel(std::int64_t numel, double host_fraction) {
  const double num_grains =
      std::round(host_fraction * static_cast<double>(numel) / double{kAlignmentNumel});
  return std::min(numel, static_cast<std::int64_t>(num_grains) * kAlignmentNumel);
}

SplitTensor SplitTensor::empty(const engine::Memory& device, const engine::Memory& host,
                               std::int64_t numel, double host_fraction, engine::DType dtype,
                               const std::string& name, engine::Category category) {
  const std::int64_t on_host = host_numel(numel, host_fraction);
  SplitTensor t;
  if (on_host < numel || numel == 0) {
    t.device_ = Tensor::empty(device, {numel - on_host}, dtype, name, category);
  }
  if (on_host > 0) t.host_ = Tensor::empty(host, {on_host}, dtype, name + ".host", category);
  return t;
}

SplitTensor SplitTensor::empty_like(const SplitTensor& like, const engine::Memory& device,
                                    const engine::Memory& host, const std::string& name,
                                    engine::Category category) {
  SplitTensor t;
  if (like.device_.defined()) {
    t.device_ = Tensor::empty(device, like.device_.shape(), like.dtype(), name, category);
  }
  if (like.host_.defined()) {
    t.host_ = Tensor::empty(host, like.host_.shape(), like.dtype(), name + ".host", category);
  }
  return t;
}

SplitTensor SplitTensor::slice(std::int64_t begin, std::int64_t numel) const {
  engine::require(begin >= 0 && numel >= 0 && begin + numel <= this->numel(),
                  "[split_tensor] expected a part of {} elements, got {} from {} on", this->numel(),
                  numel, begin);
  SplitTensor t;
  const std::int64_t end = begin + numel;
  const std::int64_t device_end = std::min(end, split());
  if (begin < device_end || (numel == 0 && device_.defined())) {
    t.device_ =
        device_.slice(std::min(begin, split()), {std::max(device_end - begin, std::int64_t{0})});
  }
  const std::int64_t host_begin = std::max(begin, split());
  if (host_begin < end || (numel == 0 && !device_.defined())) {
    t.host_ = host_.slice(host_begin - split(), {end - host_begin});
  }
  return t;
}

void copy(const Tensor& dst, const SplitTensor& src, const Stream& stream, std::string_view name) {
  if (src.device().defined()) {
    engine::copy(dst.slice(0, {src.split()}), src.device(), stream, name);
  }
  if (!src.has_host()) return;
  engine::copy(dst.slice(src.split(), src.host().shape()), src.host(), stream, name);
}

void copy_from_floats(const SplitTensor& dst, std::span<const float> values) {
  const auto split = static_cast<std::size_t>(dst.split());
  if (dst.device().defined()) engine::copy_from_floats(dst.device(), values.first(split));
  if (dst.has_host()) engine::copy_from_floats(dst.host(), values.subspan(split));
}

}  // namespace tessera::shard
