#include "tests/emulator/capture.h"

#include <algorithm>
#include <utility>

#include "tests/emulator/edges.h"

namespace tessera::cuda_emulation {
namespace {

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

}  // namespace

Capture::Capture(cudaStreamCaptureMode mode, const std::shared_ptr<Stream>& origin) : mode(mode) {
  content_.streams.push_back(origin);
  clocks_.push_back({0});
}

std::size_t Capture::index_of(const Stream& stream) const {
  const auto found = std::ranges::find(content_.streams, &stream, &std::shared_ptr<Stream>::get);
  return static_cast<std::size_t>(found - content_.streams.begin());
}

void Capture::add_work(Stream& stream, std::string name, std::function<void()> fn) {
  const std::lock_guard lock(mutex_);
  const std::size_t index = index_of(stream);
  ++clocks_[index][index];
  content_.operations.push_back({.stream = index, .name = std::move(name), .run = std::move(fn)});
}

std::shared_ptr<Record> Capture::add_record(Stream& stream) {
  const std::lock_guard lock(mutex_);
  const std::size_t index = index_of(stream);
  auto record = std::make_shared<Record>();
  record->device = stream.device;
  record->capture = shared_from_this();
  record->in_capture = content_.num_records++;
  record->clock = clocks_[index];
  content_.operations.push_back(
      {.kind = Task::Kind::kRecord, .stream = index, .record = record->in_capture});
  return record;
}

void Capture::add_wait(const std::shared_ptr<Stream>& stream, const Record& record) {
  const std::lock_guard lock(mutex_);
  const std::size_t index = index_of(*stream);
  if (index == content_.streams.size()) {
    content_.streams.push_back(stream);
    clocks_.emplace_back();
    stream->set_capture(shared_from_this());
  }
  merge(clocks_[index], record.clock);
  // A branch that only waits must be joined as well.
  clocks_[index].resize(std::max(clocks_[index].size(), index + 1), 0);
  ++clocks_[index][index];
  content_.operations.push_back(
      {.kind = Task::Kind::kWait, .stream = index, .record = record.in_capture});
}

cudaError_t Capture::end(GraphContent& content) {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  for (const std::shared_ptr<Stream>& stream : content_.streams) stream->set_capture(nullptr);
  if (spoilt_) return cudaErrorStreamCaptureInvalidated;
  const Clock& origin = clocks_.front();
  for (std::size_t i = 1; i < clocks_.size(); ++i) {
    if (i >= origin.size() || origin[i] < clocks_[i][i]) return cudaErrorStreamCaptureUnjoined;
  }
  content = std::move(content_);
  return cudaSuccess;
}

std::shared_ptr<Capture> capture_of(const Stream& stream) { return stream.capture(); }

cudaError_t work_error(const Stream& stream) {
  if (const cudaError_t error = entry_error(stream.device)) return error;
  const std::shared_ptr<Capture> capture = capture_of(stream);
  const bool is_spoilt = capture != nullptr && capture->is_spoilt();
  return is_spoilt ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

cudaError_t look_error(const Stream& stream) {
  const std::shared_ptr<Capture> capture = capture_of(stream);
  if (capture == nullptr) return unsafe_error();
  capture->spoil();
  return failed(cudaErrorStreamCaptureUnsupported);
}

cudaError_t look_error(const Record* record) {
  if (record == nullptr || record->capture == nullptr) return unsafe_error();
  if (record->capture->is_active()) record->capture->spoil();
  return failed(cudaErrorCapturedEvent);
}

cudaError_t unsafe_error(cudaError_t error) {
  HostThread& thread = host_thread();
  std::erase_if(thread.captures, [](const auto& capture) { return !capture->is_active(); });
  if (thread.capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool is_unsafe = false;
  for (const std::shared_ptr<Capture>& capture : thread.captures) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    capture->spoil();
    is_unsafe = true;
  }
  return is_unsafe ? failed(error) : cudaSuccess;
}

cudaError_t uncapturable_error(const Stream& stream) {
  const std::shared_ptr<Capture> capture = capture_of(stream);
  if (capture == nullptr) return cudaSuccess;
  capture->spoil();
  return failed(cudaErrorStreamCaptureUnsupported);
}

}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are CUDA's own names

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const Unseen unseen;
  if (mode == nullptr || *mode < cudaStreamCaptureModeGlobal ||
      *mode > cudaStreamCaptureModeRelaxed) {
    return failed(cudaErrorInvalidValue);
  }
  std::swap(host_thread().capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  const std::shared_ptr<Capture> capture = capture_of(*stream);
  *status = capture == nullptr     ? cudaStreamCaptureStatusNone
            : capture->is_spoilt() ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = entry_error(stream->device)) return error;
  if (mode != cudaStreamCaptureModeThreadLocal && mode != cudaStreamCaptureModeRelaxed) {
    fprintf(stderr,
            "cuda_emulation: captures that forbid calls of other threads are not emulated\n");
    return failed(cudaErrorNotSupported);
  }
  if (capture_of(*stream) != nullptr) return failed(cudaErrorIllegalState);
  const auto capture = std::make_shared<Capture>(mode, stream);
  stream->set_capture(capture);
  host_thread().captures.push_back(capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Unseen unseen;
  if (graph == nullptr) return failed(cudaErrorInvalidValue);
  *graph = nullptr;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  const std::shared_ptr<Capture> capture = capture_of(*stream);
  if (capture == nullptr) return failed(cudaErrorIllegalState);
  if (!capture->is_origin(*stream)) {
    capture->spoil();
    return failed(cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return failed(cudaErrorStreamCaptureWrongThread);
  }
  auto content = std::make_shared<GraphContent>();
  if (const cudaError_t error = capture->end(*content)) return failed(error);
  *graph = add_graph(std::move(content));
  return cudaSuccess;
}
