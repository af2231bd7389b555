#include "comm/host_gather.h"

#include <algorithm>
#include <utility>

#include "engine/copy.h"

namespace tessera::comm {
namespace {

Tensor room_for_all(const ProcessGroup& group, const Tensor& values, const engine::Memory& memory,
                    std::string_view label) {
  return Tensor::empty(memory, {values.numel() * group.size()}, values.dtype(), label,
                       engine::Category::kCommunication);
}

// Runs `enqueue`; see gather_values() for what happens if it throws.
template <class F>
void enqueue_or_abort(ProcessGroup& group, const Stream& stream, F enqueue) {
  try {
    enqueue();
  } catch (...) {
    group.abort("a rank could not gather its values");
    stream.synchronize_quietly();
    throw;
  }
}

}  // namespace

Tensor gather_values(ProcessGroup& group, const Tensor& values, const Stream& stream,
                     std::string_view label) {
  const engine::Memory& memory = values.buffer()->memory();
  Tensor all = room_for_all(group, values, memory, label);
  enqueue_or_abort(group, stream, [&] {
    stream.wait(memory.allocated());
    group.all_gather(values, all, stream, label);
  });
  return all;
}

HostGather::HostGather(ProcessGroup& group, Tensor values, const Stream& stream,
                       const engine::Memory& pinned, std::string_view label)
    : group_(&group),
      values_(std::move(values)),
      all_(gather_values(group, values_, stream, label)) {
  enqueue_or_abort(group, stream, [&] {
    on_host_ = room_for_all(group, values_, pinned, label);
    engine::copy(on_host_, all_, stream, "copy_values");
    ready_ = stream.record("values on the host");
  });
}

void HostGather::await(const Stream* compute) const {
  if (compute == nullptr || compute->device().is_cuda()) {
    ready_.wait();
  } else {
    compute->wait(ready_);
  }
  // A collective that was aborted on a GPU ends without an error.
  if (all_.device().is_cuda()) group_->check();
}

std::vector<std::string> gather_texts(ProcessGroup& group, std::string_view mine,
                                      const engine::Memory& memory, const Stream& stream,
                                      std::string_view label) {
  const std::int64_t size[] = {std::ssize(mine)};
  const std::vector<std::int64_t> sizes =
      gather_to_host<std::int64_t>(group, size, memory, stream, label);
  const auto longest = static_cast<std::size_t>(*std::ranges::max_element(sizes));
  std::vector<std::string> texts(sizes.size());
  if (longest == 0) return texts;
  std::vector<std::uint8_t> padded(longest);
  std::ranges::copy(mine, padded.begin());
  const std::vector<std::uint8_t> all =
      gather_to_host<std::uint8_t>(group, padded, memory, stream, label);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(rank * longest);
    texts[rank].assign(begin, begin + sizes[rank]);
  }
  return texts;
}

}  // namespace tessera::comm
