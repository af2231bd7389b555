// How processes move bytes: the seam under which an existing engine lies. Collectives are written
// once, above it, for all engines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::comm {

/// A message on its way, in either direction. It may be dropped before it is done: the transport
/// goes on with it.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Sleeps until it is done (true), or for at most `time` (false). Throws CommError that names the
  /// peer's process if it failed, as when the message that came has another length.
  virtual bool wait_for(std::chrono::milliseconds time) = 0;
};

/// The end of one process, which speaks to all others. Thread-safe. Processes are numbered from 0.
class Transport {
 public:
  virtual ~Transport() = default;
  /// Tags are below this on every transport.
  static constexpr std::uint32_t kNumTags = 1U << 22;

  /// The engine and its version: "Open MPI 4.1.4".
  virtual std::string str() const = 0;
  virtual int process() const = 0;
  virtual int num_processes() const = 0;

  /// Begins to send `bytes` to another process. They stay as they are until that is done, and
  /// `owner` keeps them alive: for ever, if the peer never takes them. Messages of one tag from one
  /// process to another arrive in order. Throws CommError; InvalidArgument for a process or a tag
  /// that there is not.
  virtual std::unique_ptr<Transfer> send(int process, std::uint32_t tag,
                                         std::span<const std::byte> bytes,
                                         std::shared_ptr<const void> owner) = 0;
  /// Begins to receive a message of exactly `bytes.size()` bytes, which `owner` keeps alive. It may
  /// have arrived before. Throws as send().
  virtual std::unique_ptr<Transfer> receive(int process, std::uint32_t tag,
                                            std::span<std::byte> bytes,
                                            std::shared_ptr<const void> owner) = 0;

  /// The world has failed: the end of this transport waits for no other process.
  virtual void give_up() noexcept {}
};

/// How processes tell each other what a transport needs to know before it can be used.
class AllGatherTexts {
 public:
  using Function = std::function<std::vector<std::string>(std::string own)>;

  AllGatherTexts() = default;
  /// `has_failed`: whether the job has failed, so that whoever waits for another process ends;
  /// from any thread. Null: nobody knows.
  template <class F>
  requires(!std::is_same_v<F, AllGatherTexts> && std::is_constructible_v<Function, F>)
      // NOLINTNEXTLINE: not explicit, as a function is given
      AllGatherTexts(F all_gather, std::function<bool()> has_failed = nullptr)
      : all_gather_(std::move(all_gather)), has_failed_(std::move(has_failed)) {}

  /// Every process's `own`, process by process. Collective.
  std::vector<std::string> operator()(std::string own) const { return all_gather_(std::move(own)); }
  const std::function<bool()>& has_failed() const { return has_failed_; }

 private:
  Function all_gather_;
  std::function<bool()> has_failed_;
};

}  // namespace tessera::comm
