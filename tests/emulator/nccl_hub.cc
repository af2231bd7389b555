// A rank whose clique is in another process: see [Note: NCCL between processes].
#include <cstring>
#include <stdexcept>

#include "tests/emulator/edges.h"
#include "tests/emulator/nccl_wire.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {

using namespace wire;  // NOLINT: what follows speaks it

namespace {

int connect_to(const std::string& name) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto [address, length] = address_of(name);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
  ::close(fd);
  return -1;
}

}  // namespace

std::shared_ptr<NcclHub> NcclHub::join(const std::string& name, std::uint64_t clique, int num_ranks,
                                       int rank, int gpu) {
  const int link = connect_to(name);
  if (link < 0) return nullptr;
  auto hub = std::make_shared<NcclHub>(name, clique, rank, link);
  const Request request{.clique = clique,
                        .number = 0,
                        .num_ranks = num_ranks,
                        .rank = rank,
                        .gpu = gpu,
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
                        .gpu = 0,
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
