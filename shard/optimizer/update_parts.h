// An update of which a part is made on the host, and what it moves there and back: see
// [Note: offload] in offload.h.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/flat.h"
#include "shard/fsdp.h"
#include "shard/slots.h"

namespace tessera::shard {

/// A part of what a rank owns of a flat, of which masters, sums and states each lie in one place.
struct UpdatePart {
  Range range;                    ///< of Flat::owned, from which it counts
  std::vector<Segment> segments;  ///< `shard_begin` counts from the part's first element
  engine::Tensor tiles = {};      ///< on a GPU, of what is updated there
  bool is_on_host = false;
  std::size_t host = 0;  ///< of Offload::hosts()
};

/// The parts of `flat`, in order: one if nothing is offloaded. Those on the host are those of
/// OffloadOptions::optimizer, for each thread some.
std::vector<UpdatePart> parts_of(const Flat& flat, const Fsdp& fsdp, const std::string& unit);

/// Staging for updates of parts, and the order of what moves.
class UpdateParts {
 public:
  /// The parts of one flat, from parts_of().
  struct Cut {
    const Flat* flat;
    const std::vector<UpdatePart>* parts;
  };
  /// For Fsdp::offload(). Allocates what all `cuts` need.
  UpdateParts(const Fsdp& fsdp, const std::vector<Cut>& cuts);

  /// Updates elements of `part`: master and sum of gradients lie where it is updated.
  using Update = std::function<void(const UpdatePart& part, const engine::Tensor& master,
                                    const engine::Tensor& grad_sum, const engine::Stream& stream)>;
  /// What Fsdp::updated() wants to know.
  struct Written {
    engine::Stream by;                   ///< what lies on the device
    std::vector<WrittenOnHost> on_host;  ///< the rest
  };
  /// Calls `update` for each part, with `stream`, which has waited for the sums as in
  /// Unit::wait_for_sums(), or a stream of the host.
  Written run(const Flat& flat, const std::vector<UpdatePart>& parts, const Unit& unit,
              const engine::Stream& stream, const Update& update);

 private:
  // A tensor where it is wanted; in a slot, if it lies elsewhere.
  struct Here {
    engine::Tensor tensor;
    SlotRing::Slot* slot = nullptr;
  };
  Here bring(const SplitTensor& t, bool to_host, std::unique_ptr<SlotRing>& ring,
             const std::string& unit, const std::vector<engine::Event>& ready,
             const engine::Stream& to);

  const Offload& offload_;
  // Of masters and sums, brought to the host and to the device.
  std::unique_ptr<SlotRing> masters_[2], sums_[2];
};

}  // namespace tessera::shard
