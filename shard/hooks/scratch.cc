#include "shard/hooks/scratch.h"

#include "engine/error.h"

namespace tessera::shard {

using engine::Memory;
using engine::Stream;
using engine::Tensor;

namespace {

// Kept with the stream, which the scratch in turn keeps alive: so only a weak link.
struct Link {
  explicit Link(const Stream&) {}
  std::weak_ptr<Scratch> scratch;
};

}  // namespace

std::shared_ptr<Scratch> Scratch::of(const Stream& stream, const Memory& memory) {
  Link& link = stream.state<Link>();
  std::shared_ptr<Scratch> scratch = link.scratch.lock();
  if (scratch == nullptr) link.scratch = scratch = std::make_shared<Scratch>(stream, memory);
  return scratch;
}

Scratch::Scratch(const Stream& stream, const Memory& memory)
    : memory_(memory), workspace_(stream.device().is_cuda() ? Memory(stream) : memory) {
  if (!stream.device().is_cuda()) return;
  // Products of many sizes follow each other, one block in use at a time: what memory has once held
  // is how much it keeps, so that few steps allocate.
  constexpr std::int64_t kMostOfAProduct = std::int64_t{32} << 20;
  workspace_.free(workspace_.allocate(kMostOfAProduct, engine::Category::kWorkspace),
                  kMostOfAProduct, engine::Category::kWorkspace);
}

void Scratch::reserve(const std::string& name, std::int64_t numel, engine::DType dtype) {
  Tensor& t = tensors_[name];
  engine::require(!t.defined() || t.dtype() == dtype, "[hook] expected one dtype of {}, got two",
                  name);
  if (t.defined() && t.numel() >= numel) return;
  t = Tensor();
  t = Tensor::empty(memory_, {numel}, dtype, "hook." + name, engine::Category::kCommunication);
}

Tensor Scratch::get(const std::string& name, const engine::Shape& shape) const {
  return tensors_.at(name).slice(0, shape);
}

}  // namespace tessera::shard
