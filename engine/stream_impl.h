// What is behind the handles of stream.h. Private to engine.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <typeindex>

#include "engine/stream.h"

namespace tessera::engine::internal {

/// std::chrono::steady_clock, in nanoseconds.
std::int64_t now_ns();

class EventState {
 public:
  virtual ~EventState() = default;
  virtual bool reached() = 0;
  /// Blocks; rethrows the error of the stream.
  virtual void wait() = 0;
};

class StreamImpl {
 public:
  StreamImpl(std::string name, StreamOptions options, Device device)
      : name_(std::move(name)), options_(options), device_(device) {}
  virtual ~StreamImpl() = default;
  StreamImpl(const StreamImpl&) = delete;
  StreamImpl& operator=(const StreamImpl&) = delete;

  virtual void launch(Work work, std::function<void()> fn) = 0;
  virtual Event record(std::string_view name) = 0;
  virtual void wait(const Event& event) = 0;
  virtual void synchronize() = 0;
  virtual std::int64_t blocked_ns() = 0;
  virtual void* native() const { return nullptr; }

  const std::string& name() const { return name_; }
  Device device() const { return device_; }
  std::map<std::type_index, std::shared_ptr<void>>& states() { return states_; }

 protected:
  const StreamOptions& options() const { return options_; }
  /// Sleeps as options().delay_seed says, if it does.
  void delay();

 private:
  const std::string name_;
  const StreamOptions options_;
  const Device device_;
  std::uint64_t delay_count_ = 0;
  std::map<std::type_index, std::shared_ptr<void>> states_;
};

std::shared_ptr<StreamImpl> make_inline_cpu(std::string name, StreamOptions options);
std::shared_ptr<StreamImpl> make_worker_cpu(std::string name, StreamOptions options);
/// Defined where CUDA is built.
std::shared_ptr<StreamImpl> make_cuda(std::string name, int index, StreamOptions options);

}  // namespace tessera::engine::internal
