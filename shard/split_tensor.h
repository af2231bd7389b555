// A flat tensor whose end may lie in memory of the host.
//
//   | 0 ......... split | split .......... numel |
//   |   on the device   |      on the host       |
//
// On CPU ranks both are memory of the host, apart only by whose books they are in: so offload runs
// the same code there.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

class SplitTensor {
 public:
  SplitTensor() = default;
  /// A tensor that is all in one place, which counts as the device. `whole`: (numel).
  SplitTensor(engine::Tensor whole);  // NOLINT(google-explicit-constructor): it is one
  /// Uninitialised. `host_fraction` of the elements, rounded to a multiple of kAlignmentNumel,
  /// lie in `host`.
  static SplitTensor empty(const engine::Memory& device, const engine::Memory& host,
                           std::int64_t numel, double host_fraction, engine::DType dtype,
                           const std::string& name, engine::Category category);
  /// Uninitialised, of the size and dtype of `like`, and split as it is.
  static SplitTensor empty_like(const SplitTensor& like, const engine::Memory& device,
                                const engine::Memory& host, const std::string& name,
                                engine::Category category);

  /// How many of `numel` elements `host_fraction` is.
  static std::int64_t host_numel(std::int64_t numel, double host_fraction);

  std::int64_t numel() const { return split() + (host_.defined() ? host_.numel() : 0); }
  std::int64_t split() const { return device_.defined() ? device_.numel() : 0; }
  engine::DType dtype() const { return device_.defined() ? device_.dtype() : host_.dtype(); }
  bool has_host() const { return host_.defined(); }
  /// What lies on the device, (split), and on the host, (numel - split); undefined where that is
  /// nothing, but for a tensor of no elements.
  const engine::Tensor& device() const { return device_; }
  const engine::Tensor& host() const { return host_; }
  /// Elements [begin, begin + numel). Throws InvalidArgument out of range.
  SplitTensor slice(std::int64_t begin, std::int64_t numel) const;

 private:
  engine::Tensor device_, host_;
};

/// dst = src as work of `stream`: equal size and dtype; see engine/copy.h.
void copy(const engine::Tensor& dst, const SplitTensor& src, const engine::Stream& stream,
          std::string_view name);
/// Writes `values`, rounded to its dtype; see engine::copy_from_floats().
void copy_from_floats(const SplitTensor& dst, std::span<const float> values);

}  // namespace tessera::shard
