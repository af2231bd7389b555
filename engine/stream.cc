#include "engine/stream.h"

#include "engine/error.h"
#include "engine/meta.h"
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

Stream Stream::meta(std::string name, DeviceKind kind, const MetaRates& rates,
                    StreamOptions options) {
  // Without the functions that enqueue kernels nothing would ask for a GPU's workspace.
  if (kind == DeviceKind::kCuda && !kCudaBuilt) {
    fail<DeviceError>(
        "[stream] expected a build with CUDA, got one without ({} on a meta device that stands for "
        "a GPU)",
        name);
  }
  return Stream(internal::make_meta(std::move(name), kind, rates, options));
}

std::int64_t meta_now_ns(const Stream& stream) { return internal::meta_now_ns(*stream.impl_); }

Stream Stream::host_worker(std::string name, StreamOptions options) const {
  if (!device().is_meta) return worker_cpu(std::move(name), options);
  return Stream(internal::make_meta_beside(*impl_, std::move(name), DeviceKind::kCpu, options,
                                           /*is_of_host=*/true));
}

Stream Stream::sibling(std::string name, StreamOptions options) const {
  if (device().is_meta) {
    return Stream(internal::make_meta_beside(*impl_, std::move(name), device().kind, options,
                                             /*is_of_host=*/false));
  }
  if (device().is_cuda()) return cuda(std::move(name), device().index, options);
  return worker_cpu(std::move(name), options);
}

Event Event::for_host() const {
  std::shared_ptr<internal::EventState> told;
  if (state_ != nullptr) told = state_->for_host();
  return told == nullptr ? *this : Event(std::move(told));
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
void Stream::push_scope(Scope scope) const { impl_->push_scope(scope); }
void Stream::pop_scope() const { impl_->pop_scope(); }
std::int64_t Stream::blocked_ns() const { return impl_->blocked_ns(); }
std::shared_ptr<const StreamTime> Stream::time() const { return impl_->time(); }
bool Stream::is_capturing() const { return impl_->is_capturing(); }
void Stream::set_capture(const std::shared_ptr<internal::StreamCapture>& capture) const {
  impl_->set_capture(capture);
}
void* Stream::native() const { return impl_->native(); }
void internal::StreamImpl::set_capture(std::shared_ptr<StreamCapture> /*capture*/) {
  fail("[graph] expected a stream of a GPU, got '{}' of {}", name(), to_string(device()));
}

std::shared_ptr<void>& Stream::state_slot(std::type_index type) const {
  return impl_->states()[type];
}

}  // namespace tessera::engine
