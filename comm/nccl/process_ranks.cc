// Ranks as processes over NCCL: what they tell each other besides tensors goes through NCCL too.
#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "comm/bootstrap/bootstrap.h"
#include "comm/nccl/group.h"
#include "comm/processes/exchange.h"
#include "comm/processes/process_rank.h"
#include "engine/cuda.h"
#include "engine/cuda_check.h"
#include "engine/error.h"
#include "engine/memory.h"

namespace tessera::comm {
namespace {

ProcessRank::Message to_message(const NcclIds& ids) {
  static_assert(sizeof(ids) <= ProcessRank::kMaxMessage);
  ProcessRank::Message message(sizeof(ids));
  std::memcpy(message.data(), &ids, sizeof(ids));
  return message;
}

NcclIds to_ids(const ProcessRank::Message& message) {
  NcclIds ids;
  std::memcpy(&ids, message.data(), sizeof(ids));
  return ids;
}

// Through the GPU's memory.
class NcclExchange final : public Exchange {
 public:
  NcclExchange(int size, int gpu)
      : gpu_(gpu),
        control_(Stream::cuda("nccl.control", gpu)),
        device_(control_),
        pinned_(engine::Memory::pinned(control_)),
        own_(buffer(pinned_, 1)),
        own_on_gpu_(buffer(device_, 1)),
        all_on_gpu_(buffer(device_, size)),
        all_(buffer(pinned_, size)) {}

  // To be called once, before the first exchange. The endpoints must have ended before this goes.
  void attach(NcclEndpoints* endpoints) { endpoints_ = endpoints; }

  void begin(std::span<const std::byte> own, const Stream* after) override {
    const Stream& stream = after != nullptr ? *after : control_;
    NcclEndpoint& endpoint = endpoints_->endpoint(0);
    World& world = endpoint.world();
    std::memcpy(own_.raw(), own.data(), own.size());
    engine::cuda::copy(stream, own_on_gpu_.raw(), own_.raw(), own_.nbytes());
    const engine::CurrentGpu current(gpu_);
    endpoint.communicator(Purpose::kGather)
        .call("ncclAllGather", world, world.time_limit(),
              [&](const NcclLibrary& nccl, ncclComm_t comm) {
                return nccl.all_gather(own_on_gpu_.raw(), all_on_gpu_.raw(), own.size(), ncclUint8,
                                       comm, static_cast<cudaStream_t>(stream.native()));
              });
    engine::cuda::copy(stream, all_.raw(), all_on_gpu_.raw(), all_.nbytes());
    done_ = stream.record("exchanged");
  }

  std::span<const std::byte> answers() override {
    if (!done_.reached()) return {};
    done_ = {};  // which a stream of the caller made
    return {all_.raw(), static_cast<std::size_t>(all_.nbytes())};
  }

  void release() noexcept override { endpoints_->watchdog()->abort_all(); }

 private:
  static Tensor buffer(const engine::Memory& memory, int num_records) {
    const auto nbytes = static_cast<std::int64_t>(ProcessRank::record_nbytes());
    return Tensor::empty(memory, {num_records * nbytes}, engine::DType::kU8, "nccl.records",
                         engine::Category::kCommunication);
  }

  const int gpu_;
  const Stream control_;
  const engine::Memory device_, pinned_;
  const Tensor own_, own_on_gpu_, all_on_gpu_, all_;
  NcclEndpoints* endpoints_ = nullptr;
  engine::Event done_;
};

class NcclProcessGroup final : public NcclGroup {
 public:
  NcclProcessGroup(int rank, std::vector<int> members, std::string name, int gpu,
                   const NcclIds& ids, const NcclOptions& options,
                   const std::shared_ptr<const NcclLibrary>& library,
                   const std::shared_ptr<World>& world, std::shared_ptr<NcclWatchdog> watchdog)
      : NcclGroup(rank, static_cast<int>(members.size()), gpu, options, library, world),
        exchange_(size_, gpu),
        self_(world, std::move(name), std::move(members), rank, exchange_) {
    auto communicators =
        join(library, ids, self_.name(), size_, {{.rank = rank_, .gpu = gpu_}}, *world_);
    std::vector<std::unique_ptr<NcclEndpoint>> endpoints;
    endpoints.push_back(std::make_unique<NcclEndpoint>(
        world_, [this](const Call& call) { self_.expire(call); },
        fmt::format("rank {} of {}", world_rank(rank_), self_.name()),
        std::move(communicators[0])));
    attach(std::make_shared<NcclEndpoints>(std::move(watchdog), std::move(endpoints)), 0);
    exchange_.attach(endpoints_.get());
  }

  // Before what they use goes.
  ~NcclProcessGroup() override { endpoints_.reset(); }

  void agree(const Stream& stream) override { self_.agree(stream); }
  void declare(std::string_view what) override { self_.declare(what); }
  void barrier(std::string_view label) override { self_.barrier(label); }

  void check() override {
    NcclGroup::check();
    self_.check();
  }

  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    ProcessRank::Part part =
        self_.split(color, key, [this] { return to_message(make_ids(*library_)); });
    return std::make_unique<NcclProcessGroup>(part.rank, std::move(part.members),
                                              std::move(part.name), gpu_, to_ids(part.message),
                                              options_, library_, world_, endpoints_->watchdog());
  }

 private:
  int world_rank(int rank) const override { return self_.world_rank(rank); }
  Call announce(const FlightCall& what, std::string text) override {
    return self_.announce(what, std::move(text));
  }

  NcclExchange exchange_;
  ProcessRank self_;
};

}  // namespace

std::unique_ptr<ProcessGroup> make_nccl_process_group(const NcclMember& member,
                                                      const NcclOptions& options,
                                                      std::shared_ptr<const NcclLibrary> library) {
  const auto world = std::make_shared<World>(options.deadline, options.on_failure, options.flight);
  const std::vector<std::byte> message = bootstrap(
      member.address, member.rank, member.size,
      member.rank == 0 ? to_message(make_ids(*library)) : ProcessRank::Message(), options.deadline);
  engine::require<CommError>(message.size() == sizeof(NcclIds),
                             "[nccl] expected an id of {} bytes, got {} (rank {})", sizeof(NcclIds),
                             message.size(), member.rank);
  std::vector<int> members(static_cast<std::size_t>(member.size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_unique<NcclProcessGroup>(member.rank, std::move(members), "world", member.gpu,
                                            to_ids(message), options, library, world,
                                            std::make_shared<NcclWatchdog>(world));
}

}  // namespace tessera::comm
