// The process of a clique, as what ranks elsewhere connect to: see [Note: NCCL between processes].
#include <poll.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "tests/emulator/edges.h"
#include "tests/emulator/nccl_wire.h"

namespace tessera::cuda_emulation {
namespace {

using namespace wire;  // NOLINT: what follows speaks it

// By clique and rank; under the mutex.
std::map<std::pair<std::uint64_t, int>, std::shared_ptr<NcclComm>>& guests() {
  static auto& all = *new std::map<std::pair<std::uint64_t, int>, std::shared_ptr<NcclComm>>;
  return all;
}

// As long as the rank elsewhere lives, or until it leaves.
void host(int fd, const Request& request) {
  NcclState& s = nccl_state();
  const std::pair key(request.clique, request.rank);
  std::shared_ptr<NcclComm> guest;
  ncclResult_t said = ncclInProgress;
  {
    const std::lock_guard lock(s.mutex);
    const ncclResult_t result =
        join_clique(request.clique, request.num_ranks, request.rank, request.gpu, guest);
    if (!guest) {
      (void)send_all(fd, result);
      return;
    }
    guest->is_guest = true;
    guest->clique->has_guests = true;
    guests()[key] = guest;
  }
  for (;;) {
    ncclResult_t news = said;
    {
      const std::lock_guard lock(s.mutex);
      if (is_complete(*guest)) news = ncclSuccess;
      if (guest->clique->error != ncclSuccess) news = guest->clique->error;
    }
    if (news != said && send_all(fd, news)) said = news;
    pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
    if (::poll(&p, 1, /*ms=*/2) <= 0) continue;
    char word = 0;
    const bool leaves = receive_all(fd, word);
    const std::lock_guard lock(s.mutex);
    if (!leaves && !s.ignores_losses && guest->clique->error == ncclSuccess) {
      guest->clique->error = ncclRemoteError;
    }
    guest->aborted = true;
    guests().erase(key);
    s.changed.notify_all();
    return;
  }
}

// Counts while it lives.
class GuestOperation {
 public:
  explicit GuestOperation(NcclClique& clique) : clique_(clique) { ++clique_.num_guest_operations; }
  ~GuestOperation() {
    const std::lock_guard lock(nccl_state().mutex);
    --clique_.num_guest_operations;
  }
  GuestOperation(const GuestOperation&) = delete;
  GuestOperation& operator=(const GuestOperation&) = delete;

 private:
  NcclClique& clique_;
};

void carry_out(int fd, const Request& request) {
  NcclState& s = nccl_state();
  std::shared_ptr<NcclComm> guest;
  std::optional<GuestOperation> operation;
  {
    const std::lock_guard lock(s.mutex);
    const auto found = guests().find({request.clique, request.rank});
    if (found == guests().end()) return;
    guest = found->second;
    operation.emplace(*guest->clique);
  }
  const std::size_t num_ranks = guest->clique->num_ranks;
  std::vector<NcclArgs> all;
  std::vector<std::vector<std::byte>> buffers(2 * static_cast<std::size_t>(request.num_args));
  for (std::size_t i = 0; i < buffers.size(); i += 2) {
    WireArgs wire{};
    if (!receive_all(fd, wire)) return;
    NcclArgs a{.kind = wire.kind,
               .send = nullptr,
               .recv = nullptr,
               .count = wire.count,
               .type = wire.type,
               .peer = wire.peer,
               .stream = nullptr};
    // One byte more: data() of nothing may be null.
    if (wire.sends) {
      const std::size_t nbytes = send_count(a, num_ranks) * nccl_size_of(a.type);
      buffers[i].resize(nbytes + 1);
      a.send = buffers[i].data();
      if (!receive_all(fd, buffers[i].data(), nbytes)) return;
    }
    if (wire.receives) {
      buffers[i + 1].resize(recv_count(a, num_ranks) * nccl_size_of(a.type) + 1);
      a.recv = buffers[i + 1].data();
    }
    all.push_back(a);
  }
  try {
    if (all[0].kind == NcclKind::kSend || all[0].kind == NcclKind::kRecv) {
      run_messages(guest, all);
    } else {
      run_collective(guest, request.number, all[0]);
    }
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    if (send_all(fd, Reply{.has_thrown = true, .nbytes = text.size()})) {
      (void)send_all(fd, text.data(), text.size());
    }
    return;
  }
  {
    const std::lock_guard lock(s.mutex);
    if (guest->aborted) return;
  }
  bool sent = send_all(fd, Reply{.has_thrown = false, .nbytes = 0});
  for (std::size_t i = 1; i < buffers.size() && sent; i += 2) {
    if (!buffers[i].empty()) sent = send_all(fd, buffers[i].data(), buffers[i].size() - 1);
  }
}

void serve(int listener) {
  const Unseen unseen;
  for (;;) {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    std::thread([fd] {
      const Unseen also;
      const Connection connection(fd);
      Request request{};
      if (!receive_all(fd, request)) return;
      if (request.num_args == 0) return host(fd, request);
      carry_out(fd, request);
    }).detach();
  }
}

std::string listen_here() {
  std::random_device random;
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "emulated_nccl_%d_%08x%08x", ::getpid(), random(),
                random());
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto [address, length] = address_of(name.data());
  if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener, 128) != 0) {
    std::perror("emulated NCCL");
    std::abort();
  }
  std::thread([listener] { serve(listener); }).detach();
  return name.data();
}

}  // namespace

const std::string& own_hub_name() {
  static const std::string& name = *new std::string(listen_here());
  return name;
}

}  // namespace tessera::cuda_emulation
