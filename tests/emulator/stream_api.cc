// Streams and events as CUDA's C functions.
#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/emulator/capture.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"

namespace tessera::cuda_emulation {
namespace {

std::shared_ptr<EventObject> find_event(cudaEvent_t handle) {
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  const auto found = machine.events.find(handle);
  if (found != machine.events.end()) return found->second;
  failed(cudaErrorInvalidResourceHandle);
  return nullptr;
}

std::shared_ptr<Record> last_record(EventObject& event) {
  const std::lock_guard lock(event.mutex);
  return event.last;
}

/// Of a wait of `stream` for an event of `capture`, which may be null, where either captures.
cudaError_t wait_in_capture_error(const Stream& stream, Capture* capture) {
  const std::shared_ptr<Capture> own = capture_of(stream);
  if (capture != nullptr && !capture->is_active()) {
    if (own != nullptr) own->spoil();
    return failed(cudaErrorCapturedEvent);
  }
  if (own != nullptr && own.get() != capture) {
    own->spoil();
    if (capture == nullptr) return failed(cudaErrorStreamCaptureIsolation);
    capture->spoil();
    return failed(cudaErrorStreamCaptureMerge);
  }
  return capture->is_spoilt() ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

}  // namespace
}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are CUDA's own names

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned int flags, int priority) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (handle == nullptr || flags > cudaStreamNonBlocking) return failed(cudaErrorInvalidValue);
  if (flags != cudaStreamNonBlocking) {
    fprintf(stderr, "cuda_emulation: only non-blocking streams are emulated\n");
    return failed(cudaErrorNotSupported);
  }
  HostThread& thread = named_host_thread();
  std::shared_ptr<Stream> stream =
      Stream::start(thread.device, thread.label + "." + std::to_string(++thread.num_streams),
                    std::clamp(priority, -5, 0));
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  *handle = reinterpret_cast<cudaStream_t>(new_handle(machine, 0x57));
  machine.streams.emplace(*handle, std::move(stream));
  machine.counters.streams.fetch_add(1, std::memory_order_relaxed);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned int flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Unseen unseen;
  Runtime& machine = runtime();
  std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = uncapturable_error(*stream)) return error;
  {
    const std::lock_guard lock(machine.mutex);
    machine.streams.erase(handle);
    machine.counters.streams.fetch_sub(1, std::memory_order_relaxed);
  }
  stream->quit();
  return entry_error(stream->device);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = entry_error(stream->device)) return error;
  if (const cudaError_t error = look_error(*stream)) return error;
  return stream->idle() ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = wait_error(stream->device)) return error;
  if (const cudaError_t error = look_error(*stream)) return error;
  count_blocking();
  const std::shared_ptr<Record> record = stream->push_record();
  if (account_wait(WaitKind::kStreamSynchronize, nullptr, record.get())) return cudaSuccess;
  record->block();
  acquire_edge(record.get());
  return entry_error(stream->device);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned int flags) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  const std::shared_ptr<EventObject> event = find_event(event_handle);
  if (!stream || !event) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = entry_error(stream->device)) return error;
  if (flags != 0) return failed(cudaErrorInvalidValue);
  std::shared_ptr<Record> record = last_record(*event);
  const std::shared_ptr<Capture> capture = record ? record->capture : nullptr;
  if (capture != nullptr || capture_of(*stream) != nullptr) {
    if (const cudaError_t error = wait_in_capture_error(*stream, capture.get())) return error;
    capture->add_wait(stream, *record);
    return cudaSuccess;
  }
  if (account_wait(WaitKind::kStreamWaitEvent, stream.get(), record.get())) return cudaSuccess;
  if (record) stream->push_wait(std::move(record));
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t fn, void* user_data) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = work_error(*stream)) return error;
  if (fn == nullptr) return failed(cudaErrorInvalidValue);
  stream->push_work("host function", [fn, user_data] {
    host_thread().in_host_function = true;
    fn(user_data);
    host_thread().in_host_function = false;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t fn, void* user_data,
                                  unsigned int flags) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = entry_error(stream->device)) return error;
  if (const cudaError_t error = uncapturable_error(*stream)) return error;
  if (fn == nullptr || flags != 0) return failed(cudaErrorInvalidValue);
  stream->push_callback([fn, handle, user_data, device = stream->device] {
    host_thread().in_host_function = true;
    fn(handle, static_cast<cudaError_t>(runtime().devices[device].sticky.load()), user_data);
    host_thread().in_host_function = false;
  });
  return cudaSuccess;
}

namespace {

CUresult emulated_wait_value(CUstream handle, CUdeviceptr address, cuuint32_t value,
                             unsigned int flags) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (entry_error(stream->device) != cudaSuccess) return CUDA_ERROR_UNKNOWN;
  if (uncapturable_error(*stream) != cudaSuccess) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
  const auto* sticky = &runtime().devices[stream->device].sticky;
  stream->push_work("wait value", [word = reinterpret_cast<cuuint32_t*>(address), value, sticky] {
    const auto is_reached = [&] {
      return static_cast<std::int32_t>(std::atomic_ref(*word).load(std::memory_order_acquire) -
                                       value) >= 0;
    };
    while (!is_reached() && sticky->load(std::memory_order_relaxed) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return CUDA_SUCCESS;
}

CUresult emulated_current_context(CUcontext* context) {
  const Unseen unseen;
  *context = host_thread().has_context
                 ? reinterpret_cast<CUcontext>(&runtime().devices[host_thread().device])
                 : nullptr;
  return CUDA_SUCCESS;
}

void* driver_function(std::string_view name) {
  if (name == "cuStreamWaitValue32") return reinterpret_cast<void*>(&emulated_wait_value);
  if (name == "cuCtxGetCurrent") return reinterpret_cast<void*>(&emulated_current_context);
  return nullptr;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const Unseen unseen;
  if (const cudaError_t error = device_error(host_thread().device)) return error;
  *function = driver_function(symbol);
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  *device = stream->device;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned int* flags) {
  const Unseen unseen;
  if (!find_stream(handle)) return cudaErrorInvalidResourceHandle;
  *flags = cudaStreamNonBlocking;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned int flags) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (handle == nullptr || flags > (cudaEventBlockingSync | cudaEventDisableTiming)) {
    return failed(cudaErrorInvalidValue);
  }
  auto event = std::make_shared<EventObject>();
  event->device = host_thread().device;
  event->flags = flags;
  Runtime& machine = runtime();
  if (event->has_times()) machine.counters.timed_events.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(machine.mutex);
  *handle = reinterpret_cast<cudaEvent_t>(new_handle(machine, 0xE7));
  machine.events.emplace(*handle, std::move(event));
  machine.counters.events.fetch_add(1, std::memory_order_relaxed);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Unseen unseen;
  const std::shared_ptr<EventObject> event = find_event(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  Runtime& machine = runtime();
  {
    const std::lock_guard lock(machine.mutex);
    machine.events.erase(handle);
    machine.counters.events.fetch_sub(1, std::memory_order_relaxed);
  }
  return entry_error(event->device);
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(stream_handle);
  const std::shared_ptr<EventObject> event = find_event(handle);
  if (!stream || !event) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = work_error(*stream)) return error;
  if (event->device != stream->device) return failed(cudaErrorInvalidResourceHandle);
  if (event->has_times()) runtime().counters.timed_records.fetch_add(1, std::memory_order_relaxed);
  const std::shared_ptr<Capture> capture = capture_of(*stream);
  const std::lock_guard lock(event->mutex);
  event->last = capture != nullptr ? capture->add_record(*stream) : stream->push_record();
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Unseen unseen;
  const std::shared_ptr<EventObject> event = find_event(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = entry_error(event->device)) return error;
  const std::shared_ptr<Record> record = last_record(*event);
  if (const cudaError_t error = look_error(record.get())) return error;
  if (!record) return cudaSuccess;
  if (record->done.load() == 0) return failed(cudaErrorNotReady);
  // Events with times are asked about for statistics, where an early "yes" must not hide a race.
  if (!event->has_times()) acquire_edge(record.get());
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Unseen unseen;
  const std::shared_ptr<EventObject> event = find_event(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = wait_error(event->device)) return error;
  const std::shared_ptr<Record> record = last_record(*event);
  if (const cudaError_t error = look_error(record.get())) return error;
  count_blocking();
  if (account_wait(WaitKind::kEventSynchronize, nullptr, record.get())) return cudaSuccess;
  if (record) {
    record->block();
    acquire_edge(record.get());
  }
  return entry_error(event->device);
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  const Unseen unseen;
  const std::shared_ptr<EventObject> start = find_event(start_handle);
  const std::shared_ptr<EventObject> end = find_event(end_handle);
  if (!start || !end) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = entry_error(start->device)) return error;
  const std::shared_ptr<Record> begun = last_record(*start);
  const std::shared_ptr<Record> ended = last_record(*end);
  for (const Record* record : {begun.get(), ended.get()}) {
    if (record == nullptr || record->capture == nullptr) continue;
    return look_error(record);
  }
  if (ms == nullptr) return failed(cudaErrorInvalidValue);
  if (!start->has_times() || !end->has_times() || !begun || !ended ||
      start->device != end->device) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (begun->done.load() == 0 || ended->done.load() == 0) return failed(cudaErrorNotReady);
  *ms = static_cast<float>(static_cast<double>(ended->time_ns - begun->time_ns) * 1e-6);
  return cudaSuccess;
}
