// Stream capture: streams whose work becomes a graph. Called Unseen, as internal.h.
//
// [Note: captures]
// While a stream captures, what is pushed on it is kept instead of run. Another stream joins by
// waiting for an event of the capture, and must be waited for in turn before the end. A launch of
// the graph pushes what was kept on streams of the graph's own, one for each stream of the capture,
// in the order of the capture: so branches run side by side, ordered by their waits alone. What
// CUDA refuses in a capture, or may refuse, is refused, and spoils the capture as it does there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/emulator/internal.h"

namespace tessera::cuda_emulation {

/// What a graph is made of, in the order of the capture.
struct GraphOperation {
  Task::Kind kind = Task::Kind::kWork;
  std::size_t stream = 0;  ///< of the capture
  std::string name = {};
  std::function<void()> run = {};
  std::size_t record = 0;  ///< that is made, or waited for
};

struct GraphContent {
  std::vector<std::shared_ptr<Stream>> streams;  ///< the first began the capture
  std::vector<GraphOperation> operations;
  std::size_t num_records = 0;
};

/// From cudaStreamBeginCapture to cudaStreamEndCapture.
class Capture : public std::enable_shared_from_this<Capture> {
 public:
  Capture(cudaStreamCaptureMode mode, const std::shared_ptr<Stream>& origin);

  const cudaStreamCaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();

  bool is_origin(const Stream& stream) const { return content_.streams.front().get() == &stream; }
  bool is_active() const { return !ended_; }
  bool is_spoilt() const { return spoilt_; }
  /// Nothing but the end is left.
  void spoil() { spoilt_ = true; }
  void add_work(Stream& stream, std::string name, std::function<void()> fn);
  std::shared_ptr<Record> add_record(Stream& stream);
  /// `stream` joins if it does not capture yet.
  void add_wait(const std::shared_ptr<Stream>& stream, const Record& record);
  /// All streams leave. What was captured, unless it is spoilt or a stream was not waited for.
  cudaError_t end(GraphContent& content);

 private:
  std::size_t index_of(const Stream& stream) const;

  std::mutex mutex_;
  std::atomic<bool> spoilt_{false}, ended_{false};
  GraphContent content_;
  std::vector<Clock> clocks_;  // of streams: what has happened before, as in the account
};

/// Null: `stream` does not capture.
std::shared_ptr<Capture> capture_of(const Stream& stream);
/// The error of putting work on `stream` now: entry_error(), or that of a capture that is spoilt.
cudaError_t work_error(const Stream& stream);
/// The error of looking at a capturing stream, or at an event of one, which spoils the capture.
cudaError_t look_error(const Stream& stream);
cudaError_t look_error(const Record* record);
/// The error of a call that is unsafe while the calling thread captures, which spoils the capture.
cudaError_t unsafe_error(cudaError_t error = cudaErrorStreamCaptureUnsupported);
/// The error of a call that a capture of `stream` cannot hold, which spoils the capture.
cudaError_t uncapturable_error(const Stream& stream);

}  // namespace tessera::cuda_emulation
