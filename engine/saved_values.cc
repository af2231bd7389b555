#include "engine/saved_values.h"

#include <array>
#include <utility>

#include "engine/live_buffers.h"
#include "engine/philox.h"

namespace tessera::engine {

namespace {

// Of bytes that nothing is about to write; 0 where there are none to be read.
std::uint64_t checksum_of_ready(const Stream& compute, const Tensor& tensor) {
  if (compute.device().is_meta || !tensor.buffer()->resident()) return 0;
  std::vector<char> bytes(static_cast<std::size_t>(tensor.nbytes()));
  tensor.copy_to_host(bytes.data());
  return fnv1a({bytes.data(), bytes.size()});
}

constexpr int kNumCopies = 32;

Tensor all_of(const std::shared_ptr<Buffer>& buffer) {
  return {buffer, 0, {buffer->nbytes()}, DType::kU8};
}

}  // namespace

std::uint64_t checksum_of(const Stream& compute, const Tensor& tensor) {
  compute.synchronize();
  return checksum_of_ready(compute, tensor);
}

SavedValues::SavedValues(const Memory& memory, const Stream& compute, const Copy& copy) {
  compute.synchronize();  // its work holds tensors, too
  std::vector<std::pair<std::shared_ptr<Buffer>, long>> before;
  for (std::shared_ptr<Buffer>& buffer : memory.live_buffers()->all()) {
    const long count = buffer.use_count();
    before.emplace_back(std::move(buffer), count);
  }
  std::array<std::shared_ptr<void>, kNumCopies> held;
  for (std::shared_ptr<void>& h : held) h = copy();
  for (const auto& [buffer, count] : before) {
    const bool is_saved = buffer.use_count() > count + kNumCopies / 2 && buffer->resident() &&
                          buffer->category() == Category::kActivation;
    if (is_saved) values_.push_back({buffer, checksum_of_ready(compute, all_of(buffer))});
  }
}

void SavedValues::check(const Stream& compute, std::string_view op) const {
  if (values_.empty()) return;
  compute.synchronize();
  for (const Value& value : values_) {
    const std::shared_ptr<Buffer> buffer = value.buffer.lock();
    if (buffer == nullptr || !buffer->resident()) continue;
    require(checksum_of_ready(compute, all_of(buffer)) == value.checksum,
            "[tape] expected '{}' as {} saved it in forward, got other values in its backward: it "
            "was written in between",
            buffer->name(), op);
  }
}

}  // namespace tessera::engine
