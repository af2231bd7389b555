#include "comm/nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <span>
#include <utility>

#include "comm/flight_call.h"
#include "comm/nccl/group.h"
#include "comm/threads/thread_ranks.h"
#include "engine/cuda.h"
#include "engine/error.h"

namespace tessera::comm {

void NcclGroup::check() {
  endpoint_->poll();
  world_->check();
}

void NcclGroup::abort(std::string_view reason) noexcept {
  world_->abort_by(world_rank(rank_), reason);
  endpoints_->watchdog()->abort_all();
}

std::optional<std::int64_t> NcclGroup::own_bytes_sent(const Collective& c) const {
  return staged_bytes_sent(c, rank_, size_, options_.canonical);
}

std::int64_t NcclGroup::enqueue(Collective collective, const Stream& stream) {
  const engine::Device device{engine::DeviceKind::kCuda, gpu_};
  engine::require(stream.device() == device,
                  "[{}] expected a stream of {}, got '{}' of {} ({}, rank {})",
                  collective.work.name, to_string(device), stream.name(),
                  to_string(stream.device()), collective.work.detail, world_rank(rank_));
  world_->check();
  Call call = announce(flight_call(collective), collective.text);
  engine::Event begin = stream.record("begin");
  std::int64_t sent = 0;
  try {
    stream.launch(std::move(collective.work), [&] {
      sent =
          enqueue_nccl(collective, rank_, size_, options_.canonical, *endpoint_, staging_, stream);
    });
  } catch (const CommError& error) {
    call.flight.enter(FlightState::kFailed);
    look_after(call);
    // Either it says why the world failed, or the world fails with it.
    world_->abort(fmt::format("[{} #{}] rank {} failed: {}; {}", call.op, call.sequence,
                              world_rank(rank_), error.what(), call.text));
    endpoints_->watchdog()->abort_all();
    world_->check();
    throw;
  }
  endpoint_->watch(stream, std::move(call), std::move(begin), stream.record("end"));
  return sent;
}

namespace {

// Ranks as threads: host calls meet as those of comm:threads do.
class NcclThreadGroup final : public NcclGroup {
 public:
  NcclThreadGroup(const std::shared_ptr<Rendezvous>& group, int rank, const NcclOptions& options,
                  std::shared_ptr<const NcclLibrary> library,
                  std::shared_ptr<NcclEndpoints> endpoints, ThreadRank::Kind kind)
      : NcclGroup(rank, group->size(), gpu_of(*group, rank, options), options, std::move(library),
                  group->world()),
        self_(group, rank, kind) {
    attach(std::move(endpoints), static_cast<std::size_t>(rank));
  }

  // announce() compares each call.
  void agree(const Stream&) override {}
  void declare(std::string_view what) override { self_.declare(what); }
  void barrier(std::string_view label) override { self_.barrier(label); }

  // The last to come makes the communicators of all.
  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    const auto [group, rank] = self_.split(color, key);
    std::shared_ptr<NcclEndpoints> endpoints;
    const auto run = [&, &group = group](std::span<const Slot> slots, int block, std::int64_t) {
      if (block != 0) return;
      const auto made = make_endpoints(group, options_, library_, endpoints_->watchdog());
      for (const Slot& slot : slots) *static_cast<std::shared_ptr<NcclEndpoints>*>(slot.out) = made;
    };
    group->meet(rank, {.sequence = -1, .op = "split", .text = "split"},
                {.in = nullptr, .out = &endpoints},
                {.num_per_block = 1, .wake = false, .run = run});
    return std::make_unique<NcclThreadGroup>(group, rank, options_, library_, std::move(endpoints),
                                             ThreadRank::Kind::kSplit);
  }

  static int gpu_of(const Rendezvous& rendezvous, int rank, const NcclOptions& options) {
    const int world_rank = rendezvous.world_rank(rank);
    return options.gpus.empty() ? world_rank : options.gpus[static_cast<std::size_t>(world_rank)];
  }

  static std::shared_ptr<NcclEndpoints> make_endpoints(
      const std::shared_ptr<Rendezvous>& rendezvous, const NcclOptions& options,
      const std::shared_ptr<const NcclLibrary>& library, std::shared_ptr<NcclWatchdog> watchdog) {
    std::vector<LocalRank> ranks;
    for (int r = 0; r < rendezvous->size(); ++r) {
      ranks.push_back({.rank = r, .gpu = gpu_of(*rendezvous, r, options)});
    }
    auto communicators = join(library, make_ids(*library), rendezvous->name(), rendezvous->size(),
                              ranks, *rendezvous->world());
    std::vector<std::unique_ptr<NcclEndpoint>> endpoints;
    for (int r = 0; r < rendezvous->size(); ++r) {
      endpoints.push_back(std::make_unique<NcclEndpoint>(
          rendezvous->world(),
          [rendezvous](const Call& call, bool is_late) {
            if (is_late) rendezvous->expire(call);
          },
          fmt::format("rank {} of {}", rendezvous->world_rank(r), rendezvous->name()),
          std::move(communicators[static_cast<std::size_t>(r)])));
    }
    return std::make_shared<NcclEndpoints>(std::move(watchdog), std::move(endpoints));
  }

 private:
  int world_rank(int rank) const override { return self_.group()->world_rank(rank); }
  Call announce(const FlightCall& what, std::string text) override {
    Call call = self_.next_call(what, std::move(text));
    self_.group()->announce(self_.rank(), call);
    return call;
  }

  ThreadRank self_;
};

}  // namespace

void check_gpus(int size, const NcclOptions& options) {
  const int count = engine::cuda::num_devices();
  if (options.gpus.empty()) {
    engine::require(size <= count,
                    "[nccl] expected a GPU for each of {} ranks, got {} (several ranks on one GPU "
                    "run with comm:threads)",
                    size, count);
    return;
  }
  engine::require(options.gpus.size() == static_cast<std::size_t>(size),
                  "[nccl] expected GPUs of {} ranks, got {}", size, options.gpus.size());
  for (auto gpu = options.gpus.begin(); gpu != options.gpus.end(); ++gpu) {
    engine::require(*gpu >= 0 && *gpu < count, "[nccl] expected a GPU below {}, got {}", count,
                    *gpu);
    engine::require(std::find(options.gpus.begin(), gpu, *gpu) == gpu,
                    "[nccl] expected a GPU for each rank, got cuda:{} twice (several ranks on one "
                    "GPU run with comm:threads)",
                    *gpu);
  }
}

namespace {

std::vector<std::unique_ptr<ProcessGroup>> make_groups(
    const std::shared_ptr<Rendezvous>& rendezvous, const NcclOptions& options) {
  check_gpus(rendezvous->size(), options);
  const auto library = NcclLibrary::load(options.library_path);
  const auto endpoints = NcclThreadGroup::make_endpoints(
      rendezvous, options, library, std::make_shared<NcclWatchdog>(rendezvous->world()));
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int r = 0; r < rendezvous->size(); ++r) {
    groups.push_back(std::make_unique<NcclThreadGroup>(rendezvous, r, options, library, endpoints,
                                                       ThreadRank::Kind::kWorld));
  }
  return groups;
}

}  // namespace

std::vector<std::unique_ptr<ProcessGroup>> make_nccl_world(int size, NcclOptions options) {
  return make_groups(make_world(size, options.deadline, options.on_failure, options.flight),
                     options);
}

void run_nccl_ranks(int size, NcclOptions options, const std::function<void(ProcessGroup&)>& fn) {
  const auto rendezvous = make_world(size, options.deadline, options.on_failure, options.flight);
  run_on_threads(make_groups(rendezvous, options), *rendezvous->world(), fn);
}

}  // namespace tessera::comm
