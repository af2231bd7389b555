#include "comm/mpi/mpi_transport.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <exception>
#include <thread>
#include <utility>

#include "comm/mpi/engine.h"
#include "comm/mpi/library.h"
#include "comm/world/futex.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

Clock::time_point deadline_in(std::chrono::milliseconds time) {
  return Clock::now() + std::min<std::chrono::milliseconds>(time, std::chrono::hours(24 * 365));
}

class MpiTransfer final : public Transfer {
 public:
  MpiTransfer(std::shared_ptr<MpiEngine> engine, std::shared_ptr<MpiMessage> message)
      : engine_(std::move(engine)), message_(std::move(message)) {}
  ~MpiTransfer() override { engine_->leave_alone(*message_); }
  MpiTransfer(const MpiTransfer&) = delete;
  MpiTransfer& operator=(const MpiTransfer&) = delete;

  bool wait_for(std::chrono::milliseconds time) override {
    if (!engine_->wait(*message_, deadline_in(time))) return false;
    engine::require<engine::CommError>(message_->state == MpiMessage::kDone, "{}", message_->error);
    return true;
  }

 private:
  const std::shared_ptr<MpiEngine> engine_;
  const std::shared_ptr<MpiMessage> message_;
};

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(const MpiOptions& options)
      : deadline_(options.deadline),
        engine_(std::make_shared<MpiEngine>(MpiLibrary::load(options), options.chunk_nbytes)) {
    thread_ = std::thread([engine = engine_] { engine->run(); });
    try {
      engine_->wait_started(deadline_in(deadline_));
    } catch (...) {
      end(false, Clock::now());
      throw;
    }
  }

  ~MpiTransport() override {
    const bool is_unwinding = std::uncaught_exceptions() > num_exceptions_;
    end(!has_given_up_ && !is_unwinding, deadline_in(deadline_));
  }

  std::string str() const override { return engine_->library().name(); }
  int process() const override { return engine_->library().process(); }
  int num_processes() const override { return engine_->library().num_processes(); }

  std::unique_ptr<Transfer> send(int process, std::uint32_t tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    auto* data = const_cast<std::byte*>(bytes.data());  // a send does not write
    return post(false, process, tag, {data, bytes.size()}, std::move(owner));
  }

  std::unique_ptr<Transfer> receive(int process, std::uint32_t tag, std::span<std::byte> bytes,
                                    std::shared_ptr<const void> owner) override {
    return post(true, process, tag, bytes, std::move(owner));
  }

  void give_up() noexcept override { has_given_up_ = true; }

 private:
  std::unique_ptr<Transfer> post(bool receives, int process, std::uint32_t tag,
                                 std::span<std::byte> bytes, std::shared_ptr<const void> owner) {
    const int own = this->process(), num = num_processes();
    engine::require(process >= 0 && process < num && process != own,
                    "[mpi] expected another of {} processes, got {} (process {})", num, process,
                    own);
    engine::require(tag < kNumTags, "[mpi] expected a tag below {}, got {}", kNumTags, tag);
    auto message = std::make_shared<MpiMessage>();
    message->receives = receives;
    message->process = process;
    message->tag = tag;
    message->data = bytes.data();
    message->nbytes = bytes.size();
    message->owner = std::move(owner);
    engine_->post(message);
    return std::make_unique<MpiTransfer>(engine_, std::move(message));
  }

  void end(bool orderly, Clock::time_point deadline) {
    if (engine_->stop(orderly, deadline)) {
      thread_.join();
    } else {
      thread_.detach();  // it waits for other processes, which have failed
    }
  }

  const std::chrono::milliseconds deadline_;
  const int num_exceptions_ = std::uncaught_exceptions();
  const std::shared_ptr<MpiEngine> engine_;
  std::atomic<bool> has_given_up_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options) {
  engine::require(options.chunk_nbytes > 0 && options.chunk_nbytes <= INT_MAX,
                  "[mpi] expected chunks of 1 to {} bytes, got {}", INT_MAX, options.chunk_nbytes);
  return std::make_unique<MpiTransport>(options);
}

}  // namespace tessera::comm
