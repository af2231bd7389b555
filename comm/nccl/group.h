// What ranks over NCCL have in common. Private to comm; only where CUDA is built.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/flight_recorder.h"
#include "comm/nccl.h"
#include "comm/nccl/collectives.h"
#include "comm/nccl/watchdog.h"
#include "comm/process_group.h"
#include "comm/staging.h"
#include "comm/world/call.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// Throws InvalidArgument unless each of `size` ranks of this process has a GPU of its own.
void check_gpus(int size, const NcclOptions& options);

class NcclGroup : public ProcessGroup {
 public:
  /// One of `size` ranks, on GPU `gpu`.
  NcclGroup(int rank, int size, int gpu, const NcclOptions& options,
            std::shared_ptr<const NcclLibrary> library, std::shared_ptr<World> world)
      : rank_(rank),
        size_(size),
        gpu_(gpu),
        options_(options),
        library_(std::move(library)),
        world_(std::move(world)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool sums_in_rank_order() const override { return options_.canonical; }
  std::shared_ptr<const void> pause_deadline() override { return world_->pause_deadline(); }
  void check() override;
  void abort(std::string_view reason) noexcept override;

 protected:
  /// To be called once: where this rank sits.
  void attach(std::shared_ptr<NcclEndpoints> endpoints, std::size_t endpoint) {
    endpoints_ = std::move(endpoints);
    endpoint_ = &endpoints_->endpoint(endpoint);
  }

  const int rank_;
  const int size_;
  const int gpu_;
  const NcclOptions options_;
  const std::shared_ptr<const NcclLibrary> library_;
  const std::shared_ptr<World> world_;
  std::shared_ptr<NcclEndpoints> endpoints_;
  NcclEndpoint* endpoint_ = nullptr;

 private:
  std::optional<std::int64_t> own_bytes_sent(const Collective& c) const override;
  std::int64_t enqueue(Collective collective, const Stream& stream) override;
  /// This rank's next call, before it is enqueued. Throws CommError if the ranks are known to
  /// differ.
  virtual Call announce(const FlightCall& what, std::string text) = 0;
  /// NCCL has refused `call`: fails the world if another rank is why, as far as is known.
  virtual void look_after(const Call& /*call*/) {}

  Staging staging_{"nccl.staging"};
};

}  // namespace tessera::comm
