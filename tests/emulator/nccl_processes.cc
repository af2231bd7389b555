// Ranks of one communicator in several processes of a host.
//
// [Note: NCCL between processes] The process that makes a unique id listens at a socket which the
// id names, and has the clique: it is the hub of the others. For each rank elsewhere it has a
// guest, a communicator whose work is done by threads of this file on copies in its own memory.
// A rank elsewhere keeps one connection, on which it hears that all have joined or what failed, and
// says that it leaves; and opens one for each operation, which carries inputs there and results
// back. So whoever is killed is lost as with the real one: its connections end.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "tests/emulator/edges.h"
#include "tests/emulator/nccl_internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
namespace {

// What a connection begins with.
struct Request {
  std::uint64_t clique;
  std::uint64_t number;  // of a collective
  int num_ranks, rank, device;
  int num_args;  // 0: it joins
};

struct WireArgs {
  NcclKind kind;
  ncclDataType_t type;
  std::size_t count;
  int peer;
  bool sends, receives;
};

// What an operation ends with, before results or the text of what it threw.
struct Reply {
  bool has_thrown;
  std::size_t nbytes;  // of the text
};

bool send_all(int fd, const void* bytes, std::size_t nbytes) {
  const auto* p = static_cast<const std::byte*>(bytes);
  while (nbytes > 0) {
    const ssize_t n = ::send(fd, p, nbytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    p += n;
    nbytes -= static_cast<std::size_t>(n);
  }
  return true;
}

bool receive_all(int fd, void* bytes, std::size_t nbytes) {
  auto* p = static_cast<std::byte*>(bytes);
  while (nbytes > 0) {
    const ssize_t n = ::recv(fd, p, nbytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    p += n;
    nbytes -= static_cast<std::size_t>(n);
  }
  return true;
}

template <class T>
bool send_all(int fd, const T& value) {
  return send_all(fd, &value, sizeof(value));
}
template <class T>
bool receive_all(int fd, T& value) {
  return receive_all(fd, &value, sizeof(value));
}

class Connection {
 public:
  explicit Connection(int fd) : fd_(fd) {}
  ~Connection() {
    if (fd_ >= 0) ::close(fd_);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// In the abstract namespace: there is no file that a killed process would leave.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

int connect_to(const std::string& name) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto [address, length] = address_of(name);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
  ::close(fd);
  return -1;
}

// --- At the hub. ---

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
        join_clique(request.clique, request.num_ranks, request.rank, request.device, guest);
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

// --- Elsewhere. ---

std::shared_ptr<NcclHub> NcclHub::join(const std::string& name, std::uint64_t clique, int num_ranks,
                                       int rank, int device) {
  const int link = connect_to(name);
  if (link < 0) return nullptr;
  auto hub = std::make_shared<NcclHub>(name, clique, rank, link);
  const Request request{.clique = clique,
                        .number = 0,
                        .num_ranks = num_ranks,
                        .rank = rank,
                        .device = device,
                        .num_args = 0};
  return send_all(link, request) ? hub : nullptr;
}

NcclHub::NcclHub(std::string name, std::uint64_t clique, int rank, int link)
    : name_(std::move(name)), clique_(clique), rank_(rank), link_(link) {}

NcclHub::~NcclHub() {
  if (link_ >= 0) ::close(link_);
}

void NcclHub::hear() {
  while (link_ >= 0) {
    ncclResult_t result = ncclSuccess;
    const ssize_t n = ::recv(link_, &result, sizeof(result), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n != sizeof(result)) {
      is_lost_ = true;
      ::close(std::exchange(link_, -1));
    } else if (result == ncclSuccess) {
      is_complete_ = true;
    } else {
      error_ = result;
    }
  }
}

ncclResult_t NcclHub::error(bool has_work) const {
  const bool is_missed = is_lost_ && (has_work || !is_complete_);
  return error_ == ncclSuccess && is_missed && !nccl_state().ignores_losses ? ncclRemoteError
                                                                            : error_;
}

void NcclHub::leave() {
  const char word = 'x';
  if (link_ >= 0) (void)send_all(link_, word);
  if (link_ >= 0) ::close(std::exchange(link_, -1));
  for (const int fd : open_) ::shutdown(fd, SHUT_RDWR);
}

void NcclHub::run(const NcclComm& comm, std::uint64_t number, const std::vector<NcclArgs>& all) {
  NcclState& s = nccl_state();
  const std::size_t num_ranks = comm.clique->num_ranks;
  const auto nbytes_of = [&](const NcclArgs& a, bool sends) {
    return (sends ? send_count(a, num_ranks) : recv_count(a, num_ranks)) * nccl_size_of(a.type);
  };
  const Connection connection(connect_to(name_));
  const int fd = connection.fd();
  {
    const std::lock_guard lock(s.mutex);
    if (!comm.aborted) open_.insert(fd);
  }
  const Request request{.clique = clique_,
                        .number = number,
                        .num_ranks = 0,
                        .rank = rank_,
                        .device = 0,
                        .num_args = static_cast<int>(all.size())};
  bool going = send_all(fd, request);
  std::vector<std::byte> bytes;
  for (const NcclArgs& a : all) {
    const WireArgs wire{.kind = a.kind,
                        .type = a.type,
                        .count = a.count,
                        .peer = a.peer,
                        .sends = a.send != nullptr,
                        .receives = a.recv != nullptr};
    going = going && send_all(fd, wire);
    if (!going || a.send == nullptr) continue;
    bytes.resize(nbytes_of(a, true));
    {
      const Seen seen;
      std::memcpy(bytes.data(), storage_of(a.send), bytes.size());
    }
    going = send_all(fd, bytes.data(), bytes.size());
  }
  Reply reply{};
  going = going && receive_all(fd, reply);
  std::string text(reply.nbytes, '\0');
  going = going && receive_all(fd, text.data(), text.size());
  for (const NcclArgs& a : all) {
    if (!going || reply.has_thrown || a.recv == nullptr) continue;
    bytes.resize(nbytes_of(a, false));
    going = receive_all(fd, bytes.data(), bytes.size());
    const Seen seen;
    if (going) std::memcpy(storage_of(a.recv), bytes.data(), bytes.size());
  }
  {
    const std::lock_guard lock(s.mutex);
    open_.erase(fd);
  }
  if (going && reply.has_thrown) throw std::runtime_error(text);
  if (going) return;
  hang(comm);
  for (const NcclArgs& a : all) poison(a, num_ranks);
}

}  // namespace tessera::cuda_emulation
