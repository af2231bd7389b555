#include "engine/stream.h"

#include "engine/error.h"
#include "engine/stream_impl.h"

namespace tessera::engine {

bool Event::reached() const { return !state_ || state_->reached(); }

void Event::wait() const {
  if (state_) state_->wait();
}

Stream Stream::inline_cpu(std::string name, StreamOptions options) {
  return Stream(internal::make_inline_cpu(std::move(name), options));
}

Stream Stream::worker_cpu(std::string name, StreamOptions options) {
  return Stream(internal::make_worker_cpu(std::move(name), options));
}

Stream Stream::cuda(std::string name, int index, StreamOptions options) {
  if constexpr (kCudaBuilt) {
    return Stream(internal::make_cuda(std::move(name), index, options));
  } else {
    fail<DeviceError>("[stream] expected a build with CUDA, got one without ({} on cuda:{})", name,
                      index);
  }
}

Stream Stream::sibling(std::string name, StreamOptions options) const {
  if (device().is_cuda()) return cuda(std::move(name), device().index, options);
  return worker_cpu(std::move(name), options);
}

void Stream::launch(Work work, std::function<void()> fn) const {
  impl_->launch(std::move(work), std::move(fn));
}
Event Stream::record(std::string_view name) const { return impl_->record(name); }
void Stream::wait(const Event& event) const { impl_->wait(event); }
void Stream::synchronize() const { impl_->synchronize(); }
void Stream::synchronize_quietly() const noexcept {
  try {
    impl_->synchronize();
  } catch (...) {  // see the header
  }
}
const std::string& Stream::name() const { return impl_->name(); }
Device Stream::device() const { return impl_->device(); }
std::int64_t Stream::blocked_ns() const { return impl_->blocked_ns(); }
void* Stream::native() const { return impl_->native(); }
std::shared_ptr<void>& Stream::state_slot(std::type_index type) const {
  return impl_->states()[type];
}

}  // namespace tessera::engine
