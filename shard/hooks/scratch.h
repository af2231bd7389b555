// Memory that the hooks of one Fsdp share, since their stream runs one reduction after the other.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

class Scratch {
 public:
  /// The scratch of `stream`, made for the first that asks; it lives as long as somebody holds it.
  static std::shared_ptr<Scratch> of(const engine::Stream& stream, const engine::Memory& memory);

  Scratch(const engine::Stream& stream, const engine::Memory& memory);

  /// Before the first step: `name` has at least `numel` elements of `dtype`, which is always the
  /// same for one name.
  void reserve(const std::string& name, std::int64_t numel, engine::DType dtype);
  /// The first `numel` elements of it, as `shape`, for what is enqueued on the stream next.
  engine::Tensor get(const std::string& name, const engine::Shape& shape) const;

  /// Of the stream's own, for matrix products on a GPU.
  const engine::Memory& workspace() const { return workspace_; }

 private:
  engine::Memory memory_, workspace_;
  std::map<std::string, engine::Tensor> tensors_;
};

}  // namespace tessera::shard
