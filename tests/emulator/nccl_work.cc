// What the emulated NCCL does on streams.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "tests/emulator/bfloat16.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/nccl_internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {

NcclState& nccl_state() {
  static NcclState& s = *new NcclState;
  return s;
}

namespace {

void wait_for(const NcclComm& comm, std::unique_lock<std::mutex>& lock,
              const std::function<bool()>& is_over) {
  auto& waits = comm.clique->guest_waits;
  const auto own = comm.is_guest ? waits.insert(waits.end(), &is_over) : waits.end();
  nccl_state().changed.wait(lock, is_over);
  if (comm.is_guest) waits.erase(own);
}

// The sum of all ranks' elements from `begin` on, by a binary tree over the ranks
// that begins at `first`. Each addition is rounded to T.
template <class T>
std::vector<T> tree_sum(const std::vector<NcclArgs>& args, std::size_t begin, std::size_t count,
                        std::size_t first) {
  const std::size_t n = args.size();
  std::vector<std::vector<T>> terms;
  for (std::size_t i = 0; i < n; ++i) {
    const auto* in = reinterpret_cast<const T*>(storage_of(args[(first + i) % n].send)) + begin;
    terms.emplace_back(in, in + count);
  }
  for (std::size_t step = 1; step < n; step *= 2) {
    for (std::size_t i = 0; i + step < n; i += 2 * step) {
      for (std::size_t k = 0; k < count; ++k) {
        store_f32(terms[i][k], to_f32(terms[i][k]) + to_f32(terms[i + step][k]));
      }
    }
  }
  return std::move(terms[0]);
}

template <class T>
void all_reduce(const std::vector<NcclArgs>& args) {
  const std::vector<T> sum = tree_sum<T>(args, 0, args[0].count, args.size() - 1);
  for (const NcclArgs& to : args) {
    std::memcpy(storage_of(to.recv), sum.data(), sum.size() * sizeof(T));
  }
}

template <class T>
void reduce_scatter(const std::vector<NcclArgs>& args) {
  const std::size_t count = args[0].count;
  std::vector<std::vector<T>> sums;  // before any is written: an out may be part of an in
  for (std::size_t r = 0; r < args.size(); ++r) {
    sums.push_back(tree_sum<T>(args, r * count, count, (r + 1) % args.size()));
  }
  for (std::size_t r = 0; r < args.size(); ++r) {
    std::memcpy(storage_of(args[r].recv), sums[r].data(), count * sizeof(T));
  }
}

void carry_out(const std::vector<NcclArgs>& args) {
  const NcclArgs& a = args[0];
  const std::size_t nbytes = a.count * nccl_size_of(a.type);
  switch (a.kind) {
    case NcclKind::kAllGather:
      for (const NcclArgs& to : args) {
        for (std::size_t r = 0; r < args.size(); ++r) {
          std::memmove(storage_of(to.recv) + r * nbytes, storage_of(args[r].send), nbytes);
        }
      }
      return;
    case NcclKind::kBroadcast:
      for (const NcclArgs& to : args) {
        std::memmove(storage_of(to.recv), storage_of(args[static_cast<std::size_t>(a.peer)].send),
                     nbytes);
      }
      return;
    case NcclKind::kAllReduce:
      return a.type == ncclFloat32 ? all_reduce<float>(args) : all_reduce<BFloat16>(args);
    case NcclKind::kReduceScatter:
      return a.type == ncclFloat32 ? reduce_scatter<float>(args) : reduce_scatter<BFloat16>(args);
    case NcclKind::kSend:
    case NcclKind::kRecv:
      return;
  }
}

std::string text(const NcclArgs& a) {
  return std::string(kNcclNames[static_cast<int>(a.kind)]) + " of " + std::to_string(a.count) +
         " elements of type " + std::to_string(static_cast<int>(a.type));
}

// Of a call that differs from a peer's. A real one hangs then, or moves anything. So it hangs
// where ranks are processes, which are to notice. Between threads nothing is to come so far.
void end_in_vain(const NcclComm& comm, std::unique_lock<std::mutex>& lock,
                 const std::vector<NcclArgs>& all, const std::string& what) {
  if (!comm.clique->has_guests) throw std::runtime_error(what);
  lock.unlock();
  hang(comm);
  for (const NcclArgs& a : all) poison(a, comm.clique->num_ranks);
}

}  // namespace

bool owes_replies(const NcclClique& clique) {
  const auto num_waiting =
      std::ranges::count_if(clique.guest_waits, [](const auto* is_over) { return !(*is_over)(); });
  return clique.num_guest_operations > num_waiting;
}

void poison(const NcclArgs& a, std::size_t num_ranks) {
  if (a.recv == nullptr) return;
  std::memset(storage_of(a.recv), 0xFF, recv_count(a, num_ranks) * nccl_size_of(a.type));
}

void run_collective(const std::shared_ptr<NcclComm>& comm, std::uint64_t number,
                    const NcclArgs& args) {
  if (comm->hub) return comm->hub->run(*comm, number, {args});
  NcclState& s = nccl_state();
  std::unique_lock lock(s.mutex);
  NcclClique& clique = *comm->clique;
  if (comm->aborted) return;
  std::shared_ptr<NcclMeeting>& place = clique.meetings[number];
  if (!place) {
    place = std::make_shared<NcclMeeting>();
    place->args.resize(clique.num_ranks, args);
  }
  const std::shared_ptr<NcclMeeting> meeting = place;
  const NcclArgs& first = meeting->args[0];
  if (first.kind != args.kind || first.count != args.count || first.type != args.type ||
      first.peer != args.peer) {
    const std::string what = "NCCL: rank " + std::to_string(comm->rank) + " calls " + text(args) +
                             " where another calls " + text(first);
    return end_in_vain(*comm, lock, {args}, what);
  }
  meeting->args[static_cast<std::size_t>(comm->rank)] = args;
  release_edge(&meeting->arrived_edge);
  ++meeting->num_arrived;
  if (meeting->num_arrived == static_cast<int>(clique.num_ranks) && !meeting->broken) {
    acquire_edge(&meeting->arrived_edge);
    {
      const Seen seen;
      carry_out(meeting->args);
    }
    release_edge(&meeting->done_edge);
    meeting->done = true;
    clique.meetings.erase(number);
    s.changed.notify_all();
  }
  wait_for(*comm, lock, [&] { return meeting->done || comm->aborted; });
  if (meeting->done) {
    acquire_edge(&meeting->done_edge);
  } else {
    meeting->broken = true;
    poison(args, clique.num_ranks);
  }
}

void run_messages(const std::shared_ptr<NcclComm>& comm, const std::vector<NcclArgs>& all) {
  if (comm->hub) return comm->hub->run(*comm, 0, all);
  NcclState& s = nccl_state();
  std::unique_lock lock(s.mutex);
  NcclClique& clique = *comm->clique;
  std::vector<std::pair<int, std::shared_ptr<NcclMessage>>> sent;
  const auto leave = [&] {
    for (const auto& [peer, message] : sent) {
      std::erase(clique.mail[{comm->rank, peer}], message);
      if (message->taken) acquire_edge(&message->taken_edge);
    }
    for (const NcclArgs& a : all) poison(a, clique.num_ranks);
  };
  if (comm->aborted) return leave();
  for (const NcclArgs& a : all) {
    if (a.kind != NcclKind::kSend) continue;
    auto message = std::make_shared<NcclMessage>(NcclMessage{.send = a});
    release_edge(&message->sent_edge);
    clique.mail[{comm->rank, a.peer}].push_back(message);
    sent.emplace_back(a.peer, std::move(message));
  }
  s.changed.notify_all();
  for (const NcclArgs& a : all) {
    if (a.kind != NcclKind::kRecv) continue;
    auto& box = clique.mail[{a.peer, comm->rank}];
    wait_for(*comm, lock, [&] { return !box.empty() || comm->aborted; });
    if (comm->aborted) return leave();
    const std::shared_ptr<NcclMessage> message = box.front();
    box.pop_front();
    if (message->send.count != a.count || message->send.type != a.type) {
      const std::string what = "NCCL: rank " + std::to_string(a.peer) + " calls " +
                               text(message->send) + " where rank " + std::to_string(comm->rank) +
                               " calls " + text(a);
      return end_in_vain(*comm, lock, all, what);
    }
    acquire_edge(&message->sent_edge);
    {
      const Seen seen;
      std::memcpy(storage_of(a.recv), storage_of(message->send.send),
                  a.count * nccl_size_of(a.type));
    }
    release_edge(&message->taken_edge);
    message->taken = true;
    s.changed.notify_all();
  }
  for (const auto& peer_and_message : sent) {
    const std::shared_ptr<NcclMessage>& message = peer_and_message.second;
    wait_for(*comm, lock, [&] { return message->taken || comm->aborted; });
    if (!message->taken) return leave();
    acquire_edge(&message->taken_edge);
  }
}

void hang(const NcclComm& comm) {
  NcclState& s = nccl_state();
  std::unique_lock lock(s.mutex);
  wait_for(comm, lock, [&] { return comm.aborted; });
}

}  // namespace tessera::cuda_emulation
