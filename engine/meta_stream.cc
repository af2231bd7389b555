#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/error.h"
#include "engine/meta.h"
#include "engine/stream_impl.h"

namespace tessera::engine {
namespace {

using internal::EventState;
using internal::StreamImpl;

class MetaEvent final : public EventState {
 public:
  explicit MetaEvent(double time_s) : time_s_(time_s) {}
  bool reached() override { return true; }
  void wait() override {}
  double time_s() const { return time_s_; }

 private:
  const double time_s_;
};

// Nanoseconds of it fit into 64 bits.
constexpr double kMaxDays = 100'000;

// What the streams of one rank share.
struct MetaDevice {
  MetaRates rates;
  // When the last work ends on the link to other ranks, on each direction of the link to the host,
  // and in the host's memory.
  double link_free_s = 0, up_free_s = 0, down_free_s = 0, host_free_s = 0;
};

class MetaStream final : public StreamImpl {
 public:
  MetaStream(std::string name, DeviceKind kind, StreamOptions options,
             std::shared_ptr<MetaDevice> shared, bool is_of_host)
      : StreamImpl(std::move(name), options, Device{kind, 0, /*is_meta=*/true}),
        shared_(std::move(shared)),
        is_of_host_(is_of_host) {}

  void launch(Work work, std::function<void()> fn) override {
    const std::optional<std::uint64_t> ticket = ticket_of(work);
    if (device().is_cuda() && fn) fn();  // enqueues nothing, and asks for workspace
    const auto [seconds, free_s] = time_of(work);
    const double begin_s = free_s == nullptr ? now_s_ : std::max(now_s_, *free_s);
    require(begin_s + seconds < kMaxDays * 86400,
            "[meta] expected less than {} days of simulated time, got {:.3g} with {} (on {}): the "
            "rates are too low",
            kMaxDays, (begin_s + seconds) / 86400, work.name, name());
    now_s_ = begin_s + seconds;
    if (free_s != nullptr) *free_s = now_s_;
    if (ticket)
      options().listener->on_launch({work, name(), to_ns(begin_s), to_ns(now_s_), *ticket});
  }
  Event record(std::string_view) override { return Event(std::make_shared<MetaEvent>(now_s_)); }
  void wait(const Event& event) override {
    const auto* of_meta = dynamic_cast<MetaEvent*>(event.state());
    if (of_meta == nullptr || of_meta->time_s() <= now_s_) return;
    blocked_s_ += of_meta->time_s() - now_s_;
    now_s_ = of_meta->time_s();
  }
  void synchronize() override {}
  std::int64_t blocked_ns() override { return to_ns(blocked_s_); }
  std::shared_ptr<const StreamTime> time() override {
    return std::make_shared<StreamTime>(StreamTime{now_ns(), blocked_ns(), true});
  }

  std::int64_t now_ns() const { return to_ns(now_s_); }
  const std::shared_ptr<MetaDevice>& shared() const { return shared_; }

 private:
  static std::int64_t to_ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

  struct Time {
    double seconds;
    double* free_s;  // when what it shares with other streams is free; null: nothing
  };
  Time time_of(const Work& work) {
    const MetaRates& rates = shared_->rates;
    const auto at = [](std::int64_t nbytes, double bytes_per_s) {
      return static_cast<double>(nbytes) / bytes_per_s;
    };
    if (work.bytes_sent > 0) {
      return {rates.link_latency_s + at(work.bytes_sent, rates.link_bytes_per_s),
              &shared_->link_free_s};
    }
    if (work.bytes_up > 0)
      return {at(work.bytes_up, rates.host_link_bytes_per_s), &shared_->up_free_s};
    if (work.bytes_down > 0)
      return {at(work.bytes_down, rates.host_link_bytes_per_s), &shared_->down_free_s};
    const std::int64_t nbytes = work.bytes_read + work.bytes_written;
    if (is_of_host_) return {at(nbytes, rates.host_bytes_per_s), &shared_->host_free_s};
    return {std::max(work.flops / rates.flops_per_s, at(nbytes, rates.bytes_per_s)), nullptr};
  }

  const std::shared_ptr<MetaDevice> shared_;
  const bool is_of_host_;
  double now_s_ = 0, blocked_s_ = 0;
};

}  // namespace

namespace internal {

std::shared_ptr<StreamImpl> make_meta(std::string name, DeviceKind kind, const MetaRates& rates,
                                      StreamOptions options) {
  return std::make_shared<MetaStream>(std::move(name), kind, options,
                                      std::make_shared<MetaDevice>(MetaDevice{.rates = rates}),
                                      /*is_of_host=*/false);
}

std::shared_ptr<StreamImpl> make_meta_beside(const StreamImpl& stream, std::string name,
                                             DeviceKind kind, StreamOptions options,
                                             bool is_of_host) {
  return std::make_shared<MetaStream>(std::move(name), kind, options,
                                      dynamic_cast<const MetaStream&>(stream).shared(), is_of_host);
}

std::int64_t meta_now_ns(const StreamImpl& stream) {
  const auto* meta = dynamic_cast<const MetaStream*>(&stream);
  require(meta != nullptr, "[meta] expected a meta stream, got '{}' of {}", stream.name(),
          to_string(stream.device()));
  return meta->now_ns();
}

}  // namespace internal
}  // namespace tessera::engine
