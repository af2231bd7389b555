// Ranks as processes over NCCL: what they tell each other beside tensors goes through NCCL too.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "comm/bootstrap/bootstrap.h"
#include "comm/flight_recorder.h"
#include "comm/nccl/group.h"
#include "engine/cuda.h"
#include "engine/cuda_check.h"
#include "engine/error.h"
#include "engine/memory.h"

namespace tessera::comm {
namespace {

// What a rank says in a host call.
struct Record {
  std::uint64_t hash = 0;  // of all calls up to this one
  std::int64_t sequence = 0;
  int color = 0;
  int key = 0;
  NcclIds ids = {};     // for the group that this rank leads
  char last[128] = {};  // the last collective, cut
};

// FNV-1a.
std::uint64_t hash_more(std::uint64_t hash, std::string_view text) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return (hash ^ '\n') * 0x100000001B3u;
}

class ProcessRank final : public NcclGroup {
 public:
  // `members`: the group's ranks as ranks of the world.
  ProcessRank(int rank, std::vector<int> members, std::string name, int gpu, const NcclIds& ids,
              const NcclOptions& options, const std::shared_ptr<const NcclLibrary>& library,
              const std::shared_ptr<World>& world, std::shared_ptr<NcclWatchdog> watchdog)
      : NcclGroup(rank, static_cast<int>(members.size()), gpu, options, library, world),
        members_(std::move(members)),
        name_(std::move(name)),
        control_(Stream::cuda("nccl.control", gpu)),
        device_(control_),
        pinned_(engine::Memory::pinned(control_)),
        own_(buffer(pinned_, 1)),
        own_on_gpu_(buffer(device_, 1)),
        all_on_gpu_(buffer(device_, size_)),
        all_(buffer(pinned_, size_)) {
    if (FlightRecorder* flight = world_->flight()) {
      flight_group_ = flight->add_group(name_, members_);
      ring_ = &flight->ring(world_rank(rank_));
    }
    auto communicators = join(library, ids, name_, size_, {{.rank = rank_, .gpu = gpu_}}, *world_);
    std::vector<std::unique_ptr<NcclEndpoint>> endpoints;
    endpoints.push_back(std::make_unique<NcclEndpoint>(
        world_, nullptr, fmt::format("rank {} of {}", world_rank(rank_), name_), size_,
        std::move(communicators[0])));
    attach(std::make_shared<NcclEndpoints>(std::move(watchdog), std::move(endpoints)), 0);
  }

  // Before the buffers go: what uses them must have ended.
  ~ProcessRank() override { endpoints_.reset(); }

  void agree(const Stream& stream) override {
    end_agree(true);
    begin_exchange({}, stream);
    agreeing_ = next_call({.op = "agree"}, "agree");
    agreeing_->flight.enter(FlightState::kStarted);
    agreed_ = stream.record("agreed");
  }

  void declare(std::string_view what) override {
    announce({.op = "declare", .label = what}, std::string(what))
        .flight.enter(FlightState::kFinished);
  }

  void check() override {
    NcclGroup::check();
    end_agree(false);
  }

  void barrier(std::string_view label) override {
    const Call call =
        announce({.op = "barrier", .label = label}, fmt::format("barrier '{}'", label));
    compare(exchange({}, call), call);
  }

  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    const Call call = announce({.op = "split"}, "split");
    const auto records = exchange({.color = color, .key = key}, call);
    compare(records, call);
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r) {
      if (at(records, r).color == color) ranks.push_back(r);
    }
    std::ranges::stable_sort(ranks, {}, [&](int r) { return at(records, r).key; });

    Record own;
    if (ranks[0] == rank_) own.ids = make_ids(*library_);
    const NcclIds ids = at(exchange(own, call), ranks[0]).ids;
    const auto place = std::ranges::find(ranks, rank_) - ranks.begin();
    std::vector<int> members;
    for (const int r : ranks) members.push_back(world_rank(r));
    return std::make_unique<ProcessRank>(static_cast<int>(place), std::move(members),
                                         fmt::format("{}:{}", name_, color), gpu_, ids, options_,
                                         library_, world_, endpoints_->watchdog());
  }

 private:
  static Tensor buffer(const engine::Memory& memory, int num_records) {
    return Tensor::empty(memory, {num_records * std::int64_t{sizeof(Record)}}, engine::DType::kU8,
                         "nccl.records", engine::Category::kCommunication);
  }
  static const Record& at(const std::vector<Record>& records, int rank) {
    return records[static_cast<std::size_t>(rank)];
  }

  int world_rank(int rank) const override { return members_[static_cast<std::size_t>(rank)]; }

  Call next_call(const FlightCall& what, std::string text) {
    const std::int64_t sequence = sequence_++;
    FlightTicket flight;
    if (ring_ != nullptr) flight = {*ring_, ring_->called(flight_group_, sequence, what)};
    return {.sequence = sequence, .op = what.op, .text = std::move(text), .flight = flight};
  }

  // What the ranks will compare.
  Call announce(const FlightCall& what, std::string text) override {
    Call call = next_call(what, std::move(text));
    last_ = fmt::format("#{} {}", call.sequence, call.text);
    hash_ = hash_more(hash_, last_);
    return call;
  }

  // Gathers everybody's record into all_, as work of `stream`. One at a time.
  void begin_exchange(Record record, const Stream& stream) {
    world_->check();
    record.hash = hash_;
    record.sequence = sequence_;
    last_.copy(record.last, sizeof(record.last) - 1);
    std::memcpy(own_.raw(), &record, sizeof(record));
    engine::cuda::copy(stream, own_on_gpu_.raw(), own_.raw(), own_.nbytes());
    const engine::CurrentGpu current(gpu_);
    endpoint_->communicator(Purpose::kGather)
        .call("ncclAllGather", *world_, world_->time_limit(),
              [&](const NcclLibrary& nccl, ncclComm_t comm) {
                return nccl.all_gather(own_on_gpu_.raw(), all_on_gpu_.raw(), sizeof(Record),
                                       ncclUint8, comm, static_cast<cudaStream_t>(stream.native()));
              });
    engine::cuda::copy(stream, all_.raw(), all_on_gpu_.raw(), all_.nbytes());
  }

  std::vector<Record> end_exchange(const engine::Event& done, const Call& call) {
    const auto deadline = world_->time_limit();
    while (!done.reached()) {
      world_->check();
      if (world_->clock().now() >= deadline) {
        world_->fail(fmt::format("{} expected {} ranks within {} ms, got no answer of some; {}",
                                 where(call), size_, world_->deadline().count(), call.text));
        endpoints_->watchdog()->abort_all();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    world_->check();  // or it was released without an answer
    call.flight.enter(FlightState::kFinished);
    std::vector<Record> records(static_cast<std::size_t>(size_));
    std::memcpy(records.data(), all_.raw(), static_cast<std::size_t>(all_.nbytes()));
    return records;
  }

  std::vector<Record> exchange(const Record& record, const Call& call) {
    end_agree(true);
    call.flight.enter(FlightState::kStarted);
    begin_exchange(record, control_);
    return end_exchange(control_.record(call.op), call);
  }

  void end_agree(bool wait) {
    if (!agreeing_ || (!wait && !agreed_.reached())) return;
    const Call call = *std::exchange(agreeing_, std::nullopt);
    compare(end_exchange(std::exchange(agreed_, {}), call), call);
  }

  // All ranks find the same difference.
  void compare(const std::vector<Record>& records, const Call& call) {
    const auto differs = [&](const Record& r) {
      return r.hash != records[0].hash || r.sequence != records[0].sequence;
    };
    const auto found = std::ranges::find_if(records, differs);
    if (found == records.end()) return;
    const auto rank = static_cast<int>(found - records.begin());
    world_->fail(fmt::format("{} expected rank {}'s calls up to {}, got rank {}'s up to {}",
                             where(call), world_rank(0), std::string(records[0].last),
                             world_rank(rank), std::string(found->last)));
    endpoints_->watchdog()->abort_all();
    world_->check();
  }

  std::string where(const Call& call) const {
    return fmt::format("[{} #{} of {}]", call.op, call.sequence, name_);
  }

  const std::vector<int> members_;
  const std::string name_;
  const Stream control_;
  const engine::Memory device_, pinned_;
  const Tensor own_, own_on_gpu_, all_on_gpu_, all_;
  FlightRing* ring_ = nullptr;  // null: nothing is recorded
  int flight_group_ = 0;
  std::int64_t sequence_ = 0;
  std::uint64_t hash_ = 0xCBF29CE484222325u;
  std::string last_ = "nothing";
  std::optional<Call> agreeing_;
  engine::Event agreed_;
};

}  // namespace

std::unique_ptr<ProcessGroup> make_nccl_process_group(const NcclMember& member,
                                                      const NcclOptions& options,
                                                      std::shared_ptr<const NcclLibrary> library) {
  const auto world = std::make_shared<World>(options.deadline, options.on_failure, options.flight);
  NcclIds ids{};
  std::vector<std::byte> message(sizeof(ids));
  if (member.rank == 0) {
    ids = make_ids(*library);
    std::memcpy(message.data(), &ids, sizeof(ids));
  }
  message =
      bootstrap(member.address, member.rank, member.size, std::move(message), options.deadline);
  engine::require<CommError>(message.size() == sizeof(ids),
                             "[nccl] expected an id of {} bytes, got {} (rank {})", sizeof(ids),
                             message.size(), member.rank);
  std::memcpy(&ids, message.data(), sizeof(ids));
  std::vector<int> members(static_cast<std::size_t>(member.size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_unique<ProcessRank>(member.rank, std::move(members), "world", member.gpu, ids,
                                       options, library, world,
                                       std::make_shared<NcclWatchdog>(world));
}

}  // namespace tessera::comm
