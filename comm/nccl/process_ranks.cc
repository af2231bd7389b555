// Ranks as processes over NCCL, or as threads of several. What they compare of their calls goes
// through NCCL as well, so that it lies in the order of a stream.
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
  // An abort ends the gather of an exchange, and not the copies around it.
  ~NcclExchange() override {
    try {
      done_.wait();
    } catch (...) {  // the GPU has failed, and copies nothing more
    }
  }
  NcclExchange(const NcclExchange&) = delete;
  NcclExchange& operator=(const NcclExchange&) = delete;

  // To be called once, before the first exchange. The endpoints must have ended before this goes.
  void attach(NcclEndpoints* endpoints) { endpoints_ = endpoints; }

  void begin(std::span<const std::byte> own, const Stream* after) override {
    const Stream& stream = after != nullptr ? *after : control_;
    try {
      enqueue(own, stream);
    } catch (...) {
      try {
        done_ = stream.record("exchange failed");
      } catch (...) {  // the GPU has failed, and copies nothing more
      }
      throw;
    }
    done_ = stream.record("exchanged");
  }

  std::span<const std::byte> answers() override {
    if (!done_.reached()) return {};
    done_ = {};  // which a stream of the caller made
    return {all_.raw(), static_cast<std::size_t>(all_.nbytes())};
  }

  void release() noexcept override { endpoints_->watchdog()->abort_all(); }

 private:
  void enqueue(std::span<const std::byte> own, const Stream& stream) {
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
  }

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
  NcclOptions options;
  Link link;
  std::shared_ptr<NcclWatchdog> watchdog;
};

// What all groups of one rank share. The end of the last one leaves the world; of one that has
// failed others are told why.
struct NcclRank {
  NcclRank(std::shared_ptr<NcclProcess> in, int on_gpu, Peers knows)
      : process(std::move(in)), gpu(on_gpu), peers(std::move(knows)) {}
  ~NcclRank() {
    if (!process->link.world->has_failed()) peers.say_left();
  }
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  const std::shared_ptr<NcclProcess> process;
  const int gpu;
  const Peers peers;  // which are ranks
};

class NcclProcessGroup final : public NcclGroup {
 public:
  // The group of `own` that is called `name`, which it has joined with `communicators` as `rank`.
  NcclProcessGroup(std::shared_ptr<NcclRank> own, int rank, std::vector<int> members,
                   std::string name, NcclCommunicators communicators)
      : NcclGroup(rank, static_cast<int>(members.size()), own->gpu, own->process->options,
                  own->process->library, own->process->link.world),
        own_(std::move(own)),
        exchange_(size_, gpu_),
        self_(world_, own_->peers, std::move(name), std::move(members), rank, exchange_) {
    std::vector<std::unique_ptr<NcclEndpoint>> endpoints;
    endpoints.push_back(std::make_unique<NcclEndpoint>(
        world_, [this](const Call& call, bool is_late) { self_.watch(call, is_late); },
        fmt::format("rank {} of {}", world_rank(rank_), self_.name()), std::move(communicators)));
    attach(std::make_shared<NcclEndpoints>(own_->process->watchdog, std::move(endpoints)), 0);
    exchange_.attach(endpoints_.get());
  }

  ~NcclProcessGroup() override {
    if (std::uncaught_exceptions() != num_exceptions_) {
      world_->abort_by(world_rank(rank_), "an exception ends its group");
    }
    endpoints_.reset();  // before what they use goes
  }

  std::shared_ptr<const void> pause_deadline() override { return own_->peers.pause(); }
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
    auto communicators =
        join(library_, to_ids(part.message), part.name, static_cast<int>(part.members.size()),
             {{.rank = part.rank, .gpu = gpu_}}, *world_);
    return std::make_unique<NcclProcessGroup>(own_, part.rank, std::move(part.members),
                                              std::move(part.name), std::move(communicators[0]));
  }

 private:
  int world_rank(int rank) const override { return self_.world_rank(rank); }
  Call announce(const FlightCall& what, std::string text) override {
    return self_.announce(what, std::move(text));
  }
  void look_after(const Call& call) override { self_.watch(call, false); }

  const std::shared_ptr<NcclRank> own_;
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
  std::vector<std::unique_ptr<ProcessGroup>> ranks;
  std::shared_ptr<World> world;
};

// This process's ranks, one for each of options.gpus.
std::vector<std::unique_ptr<ProcessGroup>> make_ranks(const std::shared_ptr<Control>& control,
                                                      const std::shared_ptr<NcclProcess>& process,
                                                      const NcclIds& ids) {
  const std::vector<int>& gpus = process->options.gpus;
  const auto num_each = static_cast<int>(gpus.size());
  const int size = num_each * control->num_processes();
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  std::vector<LocalRank> here;
  for (const int gpu : gpus) {
    here.push_back(
        {.rank = num_each * control->process() + static_cast<int>(here.size()), .gpu = gpu});
  }
  const std::shared_ptr<World>& world = process->link.world;
  auto communicators = join(process->library, ids, "world", size, here, *world);
  std::vector<std::unique_ptr<ProcessGroup>> ranks;
  for (int r = 0; r < num_each; ++r) {
    const auto i = static_cast<std::size_t>(r);
    auto rank = std::make_shared<NcclRank>(process, gpus[i], peers_of(control, world, num_each, r));
    ranks.push_back(std::make_unique<NcclProcessGroup>(std::move(rank), here[i].rank, members,
                                                       "world", std::move(communicators[i])));
  }
  return ranks;
}

Joined join_world(ControlOptions self, NcclOptions options) {
  const auto num_ranks = static_cast<int>(options.gpus.size());
  engine::require(num_ranks >= 1, "[nccl] expected a GPU for each rank of this process, got none");
  self.num_ranks = num_ranks;
  Joined joined;
  join_over(self, [&](const std::shared_ptr<Control>& control) {
    check_gpus(num_ranks, options);
    const auto library = NcclLibrary::load(options.library_path);
    check_equal(*control, "transport", "nccl");
    check_equal(*control, "number of threads", std::to_string(num_ranks));
    const NcclIds ids = share_ids(*control, *library);
    Link link = link_world(control, options.deadline, options.on_failure, options.flight);
    joined.world = link.world;
    auto watchdog = std::make_shared<NcclWatchdog>(link.world);
    joined.ranks =
        make_ranks(control,
                   std::make_shared<NcclProcess>(NcclProcess{.library = library,
                                                             .options = std::move(options),
                                                             .link = std::move(link),
                                                             .watchdog = std::move(watchdog)}),
                   ids);
  });
  return joined;
}

}  // namespace

std::unique_ptr<ProcessGroup> join_nccl(const ControlOptions& control, int gpu,
                                        NcclOptions options) {
  options.gpus = {gpu};
  return std::move(join_nccl_ranks(control, std::move(options))[0]);
}

std::vector<std::unique_ptr<ProcessGroup>> join_nccl_ranks(const ControlOptions& control,
                                                           NcclOptions options) {
  return join_world(control, std::move(options)).ranks;
}

void run_joined_nccl_ranks(const ControlOptions& control, NcclOptions options,
                           const std::function<void(ProcessGroup&)>& fn) {
  Joined joined = join_world(control, std::move(options));
  run_on_threads(std::move(joined.ranks), *joined.world, fn);
}

}  // namespace tessera::comm
