#include "engine/cuda_times.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/cuda_check.h"
#include "engine/stream_impl.h"

namespace tessera::engine::internal {
namespace {

std::int64_t ns_between(const CudaMark& begin, const CudaMark& end) {
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, begin.get(), end.get()), "cudaEventElapsedTime");
  return static_cast<std::int64_t>(double{ms} * 1e6);
}

}  // namespace

// Whatever becomes of what is enqueued now, nothing begins at the same event again.
CudaMark CudaTimes::begin() {
  CudaMark begin = std::exchange(last_, nullptr);
  if (begin == nullptr || is_reached(begin.get())) begin = marks_.record(stream_);
  return begin;
}

void CudaTimes::end(Pending pending) {
  pending.end = last_ = marks_.record(stream_);
  pending_.push_back(std::move(pending));
}

// A GPU that is late by more launches is not asked at each.
void CudaTimes::end_launch(CudaMark begin, Work work, std::uint64_t ticket) {
  end({.begin = std::move(begin), .work = std::move(work), .ticket = ticket});
  if (pending_.size() <= settle_above_) return;
  settle();
  settle_above_ = std::max(kMaxPending, pending_.size() + kMaxPending / 2);
}

void CudaTimes::end_wait(CudaMark begin, std::shared_ptr<HostFlag> flag) {
  end({.begin = std::move(begin), .flag = std::move(flag)});
  settle();
}

void CudaTimes::end_time(std::shared_ptr<StreamTime> time) {
  end({.time = std::move(time)});
  settle();
}

// A thread that was held up reads the clock late, so whoever listens gets the best of some
// attempts.
void CudaTimes::set_base() {
  constexpr int kMaxAttempts = 8;
  constexpr std::int64_t kGoodNs = 50'000;
  const int attempts = listener_ != nullptr ? kMaxAttempts : 1;
  std::int64_t best_ns = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < attempts && best_ns > kGoodNs; ++i) {
    const std::int64_t begin = now_ns();
    CudaMark base = marks_.record(stream_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    const std::int64_t end = now_ns();
    if (end - begin >= best_ns) continue;
    best_ns = end - begin;
    base_ = {std::move(base), end};
  }
}

void CudaTimes::rebase() {
  set_base();
  settle(/*is_before_base=*/true);
}

// All that is past lies before the base, or all after it.
void CudaTimes::settle(bool is_before_base) {
  const auto past = std::partition_point(pending_.begin(), pending_.end(),
                                         [](const Pending& p) { return is_reached(p.end.get()); });
  std::optional<Base> last;
  for (auto n = past - pending_.begin(); n > 0; --n) {
    Pending& p = pending_.front();
    if (p.time != nullptr) {
      tell(p);
    } else if (p.work.name.empty()) {
      blocked_ns_ += ns_between(p.begin, p.end);
    } else {
      const std::int64_t end = is_before_base ? base_->ns - ns_between(p.end, base_->mark)
                                              : base_->ns + ns_between(base_->mark, p.end);
      const bool follows = last && p.begin == last->mark;
      const std::int64_t elapsed = follows ? end - last->ns : ns_between(p.begin, p.end);
      // A thread that was held up reads the host's clock late. Still no launch of a stream begins
      // before another has ended.
      const std::int64_t begin = std::max(end - elapsed, last_end_ns_);
      last_end_ns_ = begin + elapsed;
      listener_->on_launch({p.work, name_, begin, last_end_ns_, p.ticket});
      last = Base{std::move(p.end), end};
    }
    pending_.pop_front();
  }
  if (last && !is_before_base) base_ = std::move(last);
}

// From time to time, so that differences, which are f32, stay short.
void CudaTimes::tell(Pending& p) {
  if (last_time_ != nullptr) time_ns_ += ns_between(last_time_, p.end);
  last_time_ = std::move(p.end);
  *p.time = {time_ns_, blocked_ns_, true};
}

}  // namespace tessera::engine::internal
