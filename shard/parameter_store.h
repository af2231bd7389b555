// Where the parameters of one flat live. Between uses each rank holds a part of them:
//
//   master  f32, what the optimizer updates        --renew: cast; gather owned parts-->
//   wire    in the parameter dtype, what is sent   --unshard: gather-->
//   gathered  whole, in a slot of the unit         --keep: after forward, one of K parts stays-->
//
// For f32 the master is the wire copy's own part; parameters that are whole on every rank are
// computed with where they lie, and unshard() gathers nothing. Of master and wire copy a part may
// lie on the host, see [Note: offload] in offload.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "engine/buffer.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/flat.h"
#include "shard/mesh.h"
#include "shard/offload.h"
#include "shard/split_tensor.h"

namespace tessera::shard {

struct StoreContext {
  std::string name;  ///< of the unit
  const Mesh& mesh;  ///< outlives the store
  engine::Memory memory, host_memory;
  const Offload* offload;  ///< null: none; outlives the store
  double host_fraction;    ///< OffloadOptions::parameters
  engine::Stream gather;   ///< gathers are work of this stream
  Placement placement;
  engine::DType dtype;  ///< of the wire copy and of what is computed with
  bool keeps;           ///< what Placement::reshard_ranks says is kept after forward
};

class ParameterStore {
 public:
  /// Allocates wire copy and master, uninitialised. `gathered` holds what is gathered from
  /// `offset_nbytes` on; it is released until unshard().
  ParameterStore(const StoreContext& context, const Flat& flat,
                 const std::shared_ptr<engine::Buffer>& gathered, std::int64_t offset_nbytes);

  /// (owned.numel): f32, or of frozen parameters the wire copy.
  const SplitTensor& master() const { return master_; }
  /// (flat_numel) what is computed with; readable while the gathered buffer is resident.
  const engine::Tensor& whole() const { return whole_; }

  /// Enqueues the gather into the gathered buffer, which must be resident and free for writing
  /// after what the gather stream was told so far. `why` ends the collective's label.
  void unshard(std::string_view why);
  /// Makes `compute` wait until whole() may be read.
  void wait(const engine::Stream& compute) const;
  /// Copies, as work of `compute`, the part that backward gathers from, if the placement keeps one.
  /// `gathered` is the slot that holds whole().
  void keep(const engine::Stream& compute, const std::shared_ptr<engine::Buffer>& slot);
  /// What keep() copied is out of date, or was not needed.
  void drop_kept() { has_kept_ = false; }
  /// Masters were written by `stream`, and what of them lies on the host as `on_host` says: renews
  /// this rank's part of the wire copy.
  void renew(const engine::Stream& stream, const std::vector<WrittenOnHost>& on_host);
  /// After renew(): gathers the parts of the wire copy that other ranks renewed, where this one
  /// holds them too.
  void gather_renewed();

 private:
  void renew_on_host(const std::vector<WrittenOnHost>& written);

  std::string name_;
  const Mesh& mesh_;
  engine::Stream gather_;
  bool is_cut_;                               // the parameters are
  std::vector<comm::ProcessGroup*> updates_;  // that make the wire copy whole, one after the other
  const Offload* offload_;
  SplitTensor wire_, own_wire_, master_;
  engine::Tensor sent_up_;  // of masters on the host whose wire copy lies on the device
  engine::Event sent_;
  engine::Tensor whole_, kept_;
  std::int64_t own_begin_;  // of wire_ in whole_
  Range own_;               // what this rank updates, in wire_
  std::int64_t kept_begin_ = 0;
  bool has_kept_ = false;
  std::vector<engine::Event> updated_;  // the wire copy may be sent
  std::vector<engine::Event> ready_;
};

}  // namespace tessera::shard
