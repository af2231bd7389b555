// Ranks as processes over NCCL. What they compare of their calls goes through NCCL as well, so that
// it lies in the order of a stream.
#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/control/control.h"
#include "comm/link.h"
#include "comm/nccl/group.h"
#include "comm/processes/exchange.h"
#include "comm/processes/process_rank.h"
#include "comm/threads/thread_ranks.h"
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

// What all groups of this process share.
struct NcclProcess {
  std::shared_ptr<const NcclLibrary> library;
  int gpu;
  NcclOptions options;
  Link link;
  std::shared_ptr<NcclWatchdog> watchdog;
};

class NcclProcessGroup final : public NcclGroup {
 public:
  NcclProcessGroup(std::shared_ptr<NcclProcess> process, int rank, std::vector<int> members,
                   std::string name, const NcclIds& ids)
      : NcclGroup(rank, static_cast<int>(members.size()), process->gpu, process->options,
                  process->library, process->link.world),
        process_(std::move(process)),
        exchange_(size_, gpu_),
        self_(world_, process_->link.peers, std::move(name), std::move(members), rank, exchange_) {
    auto communicators =
        join(library_, ids, self_.name(), size_, {{.rank = rank_, .gpu = gpu_}}, *world_);
    std::vector<std::unique_ptr<NcclEndpoint>> endpoints;
    endpoints.push_back(std::make_unique<NcclEndpoint>(
        world_, [this](const Call& call, bool is_late) { self_.watch(call, is_late); },
        fmt::format("rank {} of {}", world_rank(rank_), self_.name()),
        std::move(communicators[0])));
    attach(std::make_shared<NcclEndpoints>(process_->watchdog, std::move(endpoints)), 0);
    exchange_.attach(endpoints_.get());
  }

  ~NcclProcessGroup() override {
    if (std::uncaught_exceptions() != num_exceptions_) {
      world_->abort_by(world_rank(rank_), "an exception ends its group");
    }
    endpoints_.reset();  // before what they use goes
  }

  std::shared_ptr<const void> pause_deadline() override { return process_->link.peers.pause(); }
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
    return std::make_unique<NcclProcessGroup>(process_, part.rank, std::move(part.members),
                                              std::move(part.name), to_ids(part.message));
  }

 private:
  int world_rank(int rank) const override { return self_.world_rank(rank); }
  Call announce(const FlightCall& what, std::string text) override {
    return self_.announce(what, std::move(text));
  }
  void look_after(const Call& call) override { self_.watch(call, false); }

  const std::shared_ptr<NcclProcess> process_;
  const int num_exceptions_ = std::uncaught_exceptions();
  NcclExchange exchange_;
  ProcessRank self_;
};

// Process 0's ids, on all processes. Throws CommError unless all have one NCCL.
NcclIds share_ids(Control& control, const NcclLibrary& library) {
  NcclIds ids;
  std::string own(sizeof(ids), '\0');
  if (control.process() == 0) {
    ids = make_ids(library);
    std::memcpy(own.data(), &ids, sizeof(ids));
  }
  const auto texts = control.all_gather("NCCL", own + version_text(library.version));
  const auto version = [&](std::size_t p) {
    return std::string_view(texts[p]).substr(sizeof(ids));
  };
  for (std::size_t p = 0; p < texts.size(); ++p) {
    engine::require<CommError>(version(p) == version(0),
                               "[nccl] expected NCCL {} in every process, as process 0 has it, got "
                               "{} (process {})",
                               version(0), version(p), p);
  }
  std::memcpy(&ids, texts[0].data(), sizeof(ids));
  return ids;
}

struct Joined {
  std::unique_ptr<ProcessGroup> group;
  std::shared_ptr<World> world;
};

Joined join_world(const ControlOptions& self, int gpu, NcclOptions options) {
  Joined joined;
  join_over(self, [&](const std::shared_ptr<Control>& control) {
    const int count = engine::cuda::num_devices();
    engine::require(gpu >= 0 && gpu < count, "[nccl] expected a GPU below {}, got {} (process {})",
                    count, gpu, self.process);
    const auto library = NcclLibrary::load(options.library_path);
    check_equal(*control, "transport", "nccl");
    const NcclIds ids = share_ids(*control, *library);
    Link link = link_world(control, options.deadline, options.on_failure, options.flight);
    joined.world = link.world;
    auto watchdog = std::make_shared<NcclWatchdog>(link.world);
    std::vector<int> members(static_cast<std::size_t>(self.num_processes));
    std::iota(members.begin(), members.end(), 0);
    joined.group = std::make_unique<NcclProcessGroup>(
        std::make_shared<NcclProcess>(NcclProcess{.library = library,
                                                  .gpu = gpu,
                                                  .options = std::move(options),
                                                  .link = std::move(link),
                                                  .watchdog = std::move(watchdog)}),
        self.process, std::move(members), "world", ids);
  });
  return joined;
}

}  // namespace

std::unique_ptr<ProcessGroup> join_nccl(const ControlOptions& control, int gpu,
                                        NcclOptions options) {
  return join_world(control, gpu, std::move(options)).group;
}

void run_joined_nccl_rank(const ControlOptions& control, int gpu, NcclOptions options,
                          const std::function<void(ProcessGroup&)>& fn) {
  Joined joined = join_world(control, gpu, std::move(options));
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  groups.push_back(std::move(joined.group));
  run_on_threads(std::move(groups), *joined.world, fn);
}

}  // namespace tessera::comm
