// What is behind the handles of stream.h. Private to engine.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <typeindex>
#include <vector>

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
  /// See Event::for_host(). Null: this event itself.
  virtual std::shared_ptr<EventState> for_host() { return nullptr; }
};

/// A capture of streams of a GPU, while it is made and as long as its events live; see
/// cuda_graph.h.
struct StreamCapture {
  bool is_active = true;  ///< streams still capture
  std::int64_t begin_ns = now_ns();
  std::vector<Event> before = {};  ///< recorded before it, to be waited for by the first launch
  Event last_launch = {};          ///< of the graph, its end
};

/// An event of a stream of the CPU.
class CpuEventState : public EventState {
 public:
  /// Calls `fn` with the error that the stream failed with, or null, when the event is reached: at
  /// once, or in the thread of the stream. `fn` must not throw.
  virtual void on_reached(std::function<void(const std::exception_ptr&)> fn) = 0;
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
  virtual std::shared_ptr<const StreamTime> time() { return std::make_shared<StreamTime>(); }
  virtual void* native() const { return nullptr; }
  /// From now on launches, records and waits are part of `capture`, whose streams CUDA knows; null:
  /// they are done again.
  virtual void set_capture(std::shared_ptr<StreamCapture> capture);
  virtual bool is_capturing() const { return false; }
  virtual void push_scope(Scope scope) { scopes_.push_back(scope); }
  virtual void pop_scope() { scopes_.pop_back(); }

  const std::string& name() const { return name_; }
  Device device() const { return device_; }
  std::map<std::type_index, std::shared_ptr<void>>& states() { return states_; }

 protected:
  const StreamOptions& options() const { return options_; }
  /// For a launch that somebody wants to be told of: with this number.
  std::optional<std::uint64_t> ticket_of(const Work& work) const {
    if (options_.listener == nullptr) return std::nullopt;
    return options_.listener->on_enqueue({work, name_, scopes_.empty() ? Scope() : scopes_.back()});
  }
  /// Sleeps as options().delay_seed says, if it does.
  void delay();

 private:
  const std::string name_;
  const StreamOptions options_;
  const Device device_;
  std::uint64_t delay_count_ = 0;
  std::vector<Scope> scopes_;
  std::map<std::type_index, std::shared_ptr<void>> states_;
};

std::shared_ptr<StreamImpl> make_inline_cpu(std::string name, StreamOptions options);
std::shared_ptr<StreamImpl> make_worker_cpu(std::string name, StreamOptions options);
std::shared_ptr<StreamImpl> make_meta(std::string name, DeviceKind kind, const MetaRates& rates,
                                      StreamOptions options);
/// A stream that shares the device of `stream`, a meta stream. `is_of_host`: it is a thread of that
/// device's host.
std::shared_ptr<StreamImpl> make_meta_beside(const StreamImpl& stream, std::string name,
                                             DeviceKind kind, StreamOptions options,
                                             bool is_of_host);
std::int64_t meta_now_ns(const StreamImpl& stream);
/// Defined where CUDA is built.
std::shared_ptr<StreamImpl> make_cuda(std::string name, int index, StreamOptions options);

}  // namespace tessera::engine::internal
