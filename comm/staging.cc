#include "comm/staging.h"

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::comm {

Staging::~Staging() {
  for (const Block& block : blocks_) {
    try {
      let_go(block);
    } catch (const engine::DeviceError&) {  // the GPU is lost, and nothing reads there any more
    }
  }
}

Tensor Staging::get(std::int64_t nbytes, const engine::Memory& memory, const Stream& stream) {
  const auto found = std::ranges::find(blocks_, stream, &Block::stream);
  if (found != blocks_.end()) {
    if (found->bytes.nbytes() >= nbytes) return found->bytes;
    if (stream.device().is_host()) stream.synchronize();  // calls on their way hold on to it
    let_go(*found);
    blocks_.erase(found);
  }
  Block block{stream, Tensor::empty(memory, {nbytes}, engine::DType::kU8, name_,
                                    engine::Category::kCommunication)};
  if (memory.home() && *memory.home() != stream) stream.wait(memory.home()->record("staging"));
  return blocks_.emplace_back(std::move(block)).bytes;
}

// See [Note: memory of a stream].
void Staging::let_go(const Block& block) {
  const auto& home = block.bytes.buffer()->memory().home();
  if (home && *home != block.stream) home->wait(block.stream.record("staging unused"));
}

}  // namespace tessera::comm
