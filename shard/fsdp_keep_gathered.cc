// Units that stay gathered around many forwards.
#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "shard/cut_values.h"
#include "shard/fsdp.h"

namespace tessera::shard {

using engine::require;

void Fsdp::keep_gathered(const std::function<void()>& fn) {
  if (schedule_.keeps()) return fn();
  CutValues(*this).check_at_rest("keep_gathered");
  // Where nothing is gathered nobody else would see that only some ranks call it.
  group_.declare("keep_gathered");
  std::vector<std::size_t> ring_sizes;
  for (const auto& ring : rings_) ring_sizes.push_back(ring->size());
  try {
    schedule_.renew_stale(compute_);
    schedule_.keep_gathered(compute_);
    fn();
    schedule_.renew_stale(compute_);  // peers may have forwards that do
    context_.gather.synchronize();
    compute_.synchronize();
  } catch (...) {
    let_go(ring_sizes);
    throw;
  }
  let_go(ring_sizes);
}

// Collectives write slots, and compute reads them, until both have done what they were told.
void Fsdp::let_go(const std::vector<std::size_t>& ring_sizes) {
  schedule_.let_go(compute_);
  if (context_.offload != nullptr) context_.offload->synchronize_quietly();
  for (const engine::Stream* stream : {&context_.gather, &compute_}) stream->synchronize_quietly();
  for (std::size_t i = 0; i < rings_.size(); ++i) rings_[i]->shrink(ring_sizes[i]);
}

void Fsdp::check_can_train(std::string_view caller) const {
  check_not_held(caller);
  require(!schedule_.keeps(), "[fsdp] expected {} after the end of keep_gathered(), got it inside",
          caller);
}

}  // namespace tessera::shard
