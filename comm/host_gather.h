// Small values of all ranks: gathered on their device, or on their way to the host, which reads
// them when it needs them and holds nothing up until then.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "engine/memory.h"

namespace tessera::comm {

/// [n] on every rank -> [n * size()] in new memory next to `values`, rank by rank, any dtype. Work
/// of `stream`, which starts once the home of that memory has written `values`; the home waits for
/// an event recorded after this before it uses the result. If it cannot be enqueued, the group is
/// aborted and the stream drained before the error is thrown: what was enqueued uses tensors that
/// die, and without the peers it might never end. Collective.
Tensor gather_values(ProcessGroup& group, const Tensor& values, const Stream& stream,
                     std::string_view label);

class HostGather {
 public:
  /// gather_values(), then a copy to `pinned`, which is memory of the host; a failure of either
  /// ends as there. To be kept until wait() has returned or the group has failed. Collective.
  HostGather(ProcessGroup& group, Tensor values, const Stream& stream, const engine::Memory& pinned,
             std::string_view label);

  /// Every rank's values, rank by rank. Throws CommError if the gather failed, InvalidArgument if T
  /// is not their dtype.
  template <class T>
  std::vector<T> wait() const {
    await(nullptr);
    return to_vector<T>();
  }
  /// As wait() without an argument; on the CPU `compute` is what waits, and counts the time as its
  /// own.
  template <class T>
  std::vector<T> wait(const Stream& compute) const {
    await(&compute);
    return to_vector<T>();
  }

 private:
  void await(const Stream* compute) const;
  template <class T>
  std::vector<T> to_vector() const {
    const std::span<const T> values = on_host_.span<T>();
    return {values.begin(), values.end()};
  }

  ProcessGroup* group_;
  Tensor values_, all_, on_host_;
  engine::Event ready_;
};

/// Every rank's `values`, rank by rank, through `memory`, of the device of `stream`. Blocks until
/// they are here. Throws as HostGather.
template <class T>
std::vector<T> gather_to_host(ProcessGroup& group, std::span<const T> values,
                              const engine::Memory& memory, const Stream& stream,
                              std::string_view label) {
  const auto n = static_cast<std::int64_t>(values.size());
  const Tensor in = Tensor::from<T>(memory, {n}, values, label, engine::Category::kCommunication);
  return HostGather(group, in, stream, engine::Memory::pinned(stream), label).template wait<T>();
}

/// Every rank's text `mine`, of any length on any rank, rank by rank. Blocks and throws as
/// gather_to_host().
std::vector<std::string> gather_texts(ProcessGroup& group, std::string_view mine,
                                      const engine::Memory& memory, const Stream& stream,
                                      std::string_view label);

}  // namespace tessera::comm
