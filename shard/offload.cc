#include "shard/offload.h"

#include <fmt/format.h>

#include <string>

namespace tessera::shard {

using engine::Stream;

Offload::Offload(const Stream& compute, const FsdpOptions& options)
    : fetch_(compute.sibling("fetch", options.stream_options(3))),
      sums_up_(compute.sibling("sums up", options.stream_options(4))),
      sums_down_(compute.sibling("sums down", options.stream_options(5))),
      up_(compute.sibling("up", options.stream_options(6))),
      down_(compute.sibling("down", options.stream_options(7))) {
  for (int i = 0; i < options.offload.threads; ++i) {
    hosts_.push_back(
        compute.host_worker(i == 0 ? "host" : fmt::format("host {}", i),
                            options.stream_options(8 + static_cast<std::uint64_t>(i))));
  }
}

void Offload::synchronize() const {
  for (const Stream& host : hosts_) host.synchronize();
  for (const Stream* stream : {&fetch_, &sums_up_, &sums_down_, &up_, &down_})
    stream->synchronize();
}

void Offload::synchronize_quietly() const noexcept {
  for (const Stream& host : hosts_) host.synchronize_quietly();
  for (const Stream* stream : {&fetch_, &sums_up_, &sums_down_, &up_, &down_})
    stream->synchronize_quietly();
}

}  // namespace tessera::shard
