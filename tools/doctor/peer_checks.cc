#include "tools/doctor/peer_checks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/gloo/gloo_transport.h"
#include "comm/transport/transport.h"
#include "engine/error.h"
#include "engine/io/host.h"
#include "tools/launch/processes.h"

namespace tessera::tools {
namespace {

using comm::Transport;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

// What process 0 asks another one: to send back so many bytes; or nothing more.
struct Request {
  std::int64_t nbytes = -1;
};
// Who the other one is.
struct Introduction {
  std::array<char, 65> host{};
  std::array<char, 200> connected{};
  std::int64_t pid = ::getpid();
};

// Messages to and from one process, one after the other.
class Peer {
 public:
  Peer(Transport& transport, int process, milliseconds deadline)
      : transport_(transport), process_(process), deadline_(deadline) {}

  void send(const std::shared_ptr<Bytes>& bytes) {
    wait(transport_.send(process_, kTag, *bytes, bytes));
  }
  void receive(const std::shared_ptr<Bytes>& bytes) {
    wait(transport_.receive(process_, kTag, *bytes, bytes));
  }
  template <class T>
  void send_value(const T& value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    send(std::make_shared<Bytes>(bytes.begin(), bytes.end()));
  }
  template <class T>
  T receive_value() {
    T value;
    const auto bytes = std::make_shared<Bytes>(sizeof(T));
    receive(bytes);
    std::ranges::copy(*bytes, std::as_writable_bytes(std::span(&value, 1)).begin());
    return value;
  }
  int process() const { return process_; }

 private:
  static constexpr std::uint32_t kTag = 1;

  void wait(const std::unique_ptr<comm::Transfer>& transfer) const {
    engine::require<engine::CommError>(
        transfer->wait_for(deadline_),
        "[doctor] expected messages of process {} over {} within {} ms, got none", process_,
        transport_.str(), deadline_.count());
  }

  Transport& transport_;
  const int process_;
  const milliseconds deadline_;
};

void introduce(Transport& transport, Peer& zero) {
  Introduction own;
  engine::host_name().copy(own.host.data(), own.host.size() - 1);
  transport.str().copy(own.connected.data(), own.connected.size() - 1);
  zero.send_value(own);
}

// Bytes that go there and back.
constexpr std::int64_t kFew = 8, kMany = std::int64_t{4} << 20;

void answer(Transport& transport, milliseconds deadline) {
  Peer zero(transport, 0, deadline);
  introduce(transport, zero);
  for (;;) {
    const auto request = zero.receive_value<Request>();
    if (request.nbytes < 0 || request.nbytes > kMany) return;
    const auto bytes = std::make_shared<Bytes>(static_cast<std::size_t>(request.nbytes));
    zero.receive(bytes);
    zero.send(bytes);
  }
}

// The time in which `nbytes` go there and come back, or nothing if others come back.
std::optional<std::chrono::duration<double>> round_trip(Peer& peer, std::int64_t nbytes) {
  const auto out = std::make_shared<Bytes>(static_cast<std::size_t>(nbytes));
  for (std::size_t i = 0; i < out->size(); ++i) {
    (*out)[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(peer.process()));
  }
  const auto in = std::make_shared<Bytes>(out->size());
  peer.send_value(Request{nbytes});
  const auto start = steady_clock::now();
  peer.send(out);
  peer.receive(in);
  const std::chrono::duration<double> time = steady_clock::now() - start;
  return *in == *out ? std::optional(time) : std::nullopt;
}

// The shortest of some round trips, which other programs have disturbed least.
std::optional<double> shortest(Peer& peer, std::int64_t nbytes, int num_trips) {
  constexpr milliseconds kLongEnough(300);
  std::optional<double> best;
  const auto start = steady_clock::now();
  for (int i = 0; i < num_trips; ++i) {
    const auto time = round_trip(peer, nbytes);
    if (!time) return std::nullopt;
    best = std::min(best.value_or(time->count()), time->count());
    if (steady_clock::now() - start > kLongEnough) break;
  }
  return best;
}

std::string cut(std::span<const char> text) {
  return std::string(text.begin(), std::ranges::find(text, '\0'));
}

struct Tried {
  Check check;
  double bytes_per_s = 0;
};

Tried try_peer(Peer& peer) {
  const auto who = peer.receive_value<Introduction>();
  const auto few = shortest(peer, kFew, 100), many = few ? shortest(peer, kMany, 20) : few;
  peer.send_value(Request{});
  Check check{.name = fmt::format("peer {}", peer.process())};
  check.found = fmt::format("{}, pid {}, {}", cut(who.host), who.pid, cut(who.connected));
  check.facts.add("host", cut(who.host));
  if (!many) {
    check.verdict = Verdict::kFail;
    check.found += ": other bytes come back than were sent";
    check.fix = "try another transport, or find the faulty network card or memory";
    return {std::move(check)};
  }
  const double latency_us = *few / 2 * 1e6, bytes_per_s = 2 * kMany / *many;
  check.found += fmt::format(": {:.0f} us, {:.2f} GB/s", latency_us, bytes_per_s * 1e-9);
  check.facts.add("latency_us", latency_us).add("bytes_per_s", bytes_per_s);
  return {std::move(check), bytes_per_s};
}

void warn_of_slow(std::vector<Tried>& peers) {
  const double best = std::ranges::max_element(peers, {}, &Tried::bytes_per_s)->bytes_per_s;
  for (auto& [check, bytes_per_s] : peers) {
    if (check.verdict != Verdict::kOk || bytes_per_s >= best / 4) continue;
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format(
        "others have up to {:.2f} GB/s: look for another network interface, or for what else uses "
        "this one",
        best * 1e-9);
  }
}

}  // namespace

Check check_gloo(const ParallelConfig& config) {
  Check check{.name = "gloo"};
  try {
    const auto transport = comm::make_gloo_transport(
        {.all_gather = [](const std::string& own) { return std::vector{own}; },
         .host = config.interface,
         .plugin_path = comm::find_gloo_plugin("/proc/self/exe")});
    check.found = transport->str() + ", where processes of other hosts would reach this one";
  } catch (const engine::DeviceError& error) {
    check.found = fmt::format("not here: {}", error.what());
  }
  return check;
}

Checks check_peers(const TrainConfig& config, const Launch& launch) {
  try {
    const ProcessConnections connections = connect_processes(config, launch);
    Transport& transport = *connections.transport;
    if (launch.process > 0) {
      answer(transport, config.deadline());
      return {};
    }
    std::vector<Tried> peers;
    for (int p = 1; p < launch.num_processes; ++p) {
      Peer peer(transport, p, config.deadline());
      peers.push_back(try_peer(peer));
    }
    warn_of_slow(peers);
    Checks checks = {
        {.name = "peers",
         .found = fmt::format("{}, {}", launch.all_str(/*num_threads=*/1), transport.str())}};
    for (Tried& peer : peers) checks.push_back(std::move(peer.check));
    return checks;
  } catch (const engine::Error& error) {
    return {{.name = "peers",
             .verdict = Verdict::kFail,
             .found = error.what(),
             .fix = "docs/clusters.md says what to do when processes do not find each other"}};
  }
}

}  // namespace tessera::tools
