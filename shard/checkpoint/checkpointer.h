// Saves checkpoints of a run, while training goes on if asked, and finds the one to go on from.
//
//   Checkpointer checkpointer(world, {{&fsdp, &optimizer}}, {.folder = "run/checkpoints"});
//   std::int64_t step = 0;
//   if (const auto loaded = checkpointer.load_newest()) step = loaded->step;
//   for (; step < num_steps; ++step) {
//     ... one step ...
//     if ((step + 1) % 100 == 0) checkpointer.save(step + 1, {{"next_sample", ...}});
//     checkpointer.poll();
//   }
//   checkpointer.wait();
//
// [Note: how a checkpoint becomes one]
//   every rank  copies what it owns, and from then on training goes on (async);
//               checksums of the copy, then files in step_N.tmp-NONCE, each flushed and closed
//   all ranks   exchange what they wrote; if one failed all give up, naming it
//   rank 0      adds the manifest, flushes it and the folder; renames the folder to step_N and
//               flushes its parent; replaces `latest`; only then removes old checkpoints
// A process that dies, or a machine, at any moment leaves the checkpoints that were there, or these
// and the new one. What is half written has no name that a reader looks at, and goes with the next
// run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "shard/checkpoint/agreement.h"
#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/load.h"
#include "shard/checkpoint/pieces.h"

namespace tessera::shard {

struct CheckpointerOptions {
  std::string folder;  ///< see folder.h; on a file system that all ranks share
  int keep = 3;        ///< how many checkpoints stay; 0: all
  bool async = true;   ///< write while training goes on, from a copy in memory of the host
  /// Told what a person should know, on rank 0, in the thread that calls.
  std::function<void(std::string_view)> warn = {};
};

class Checkpointer {
 public:
  /// Collective over `world`, which all groups of `parts` are of, and which outlives this; so do
  /// `parts`. Throws IoError if the folder cannot be written to or another run writes there.
  Checkpointer(comm::ProcessGroup& world, std::vector<CheckpointPart> parts,
               CheckpointerOptions options);
  /// Ends a save at work, without giving it its name.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // All collective, between steps. Errors are thrown on every rank alike: IoError naming rank, file
  // and cause, DeviceError naming the rank that had no memory. After one of save(), poll() or
  // wait() older checkpoints are as they were, and the next save() starts from the beginning. A
  // rank that has no memory to tell the others throws bad_alloc, and they an error once it leaves.

  /// Saves what the parts hold after `step` steps. `values`: what the program wants back, the same
  /// on every rank, in UTF-8. Waits for an earlier save to end: if that failed and neither poll()
  /// nor wait() has thrown its error, this throws it and begins nothing, and can be called again.
  /// Async: returns when the copy is begun; nothing is updated before it is made. Throws
  /// InvalidArgument for a step that is not after all checkpoints of the folder, not counting those
  /// that did not verify or are of another step than their name says.
  void save(std::int64_t step, std::map<std::string, std::string> values);
  /// To be called between steps while a save may be at work, on every rank. Returns its step when
  /// it has its name.
  std::optional<std::int64_t> poll();
  /// Blocks until no save is at work.
  std::optional<std::int64_t> wait();
  bool is_saving() const { return save_ != nullptr; }

  // After the end of a save at work.

  /// Loads the newest checkpoint of the folder that verifies, warning of those that do not; these
  /// stay, and are renamed if a save needs their name. Later saves are of the same run. Nothing if
  /// the folder has none. Throws IoError if none of those there verifies.
  std::optional<LoadedCheckpoint> load_newest(const LoadOptions& options = {});
  /// Loads one checkpoint, of this folder or another; later saves are of the same run. Throws
  /// InvalidArgument if this folder has newer ones, or is another one and has any: saves would be
  /// mixed with them.
  LoadedCheckpoint load(const std::string& path, const LoadOptions& options = {});
  /// Later saves are of the run of `loaded`, which was loaded by other means. Throws as load().
  void continue_from(const LoadedCheckpoint& loaded);
  /// Throws InvalidArgument if the folder has checkpoints, which a new run must not mix with its
  /// own.
  void check_is_new();

  /// Memory of the host that this rank's copies take.
  std::int64_t copy_nbytes() const;

 private:
  struct Save;

  Meeting meeting() const;
  std::string reject_if_misnamed(std::int64_t step);
  bool passes_over(std::int64_t step);
  std::optional<std::int64_t> newest_here();
  void check_step(std::int64_t step);
  void check_is_newest(const std::string& path, std::string_view name);
  void begin(std::map<std::string, std::string> values);
  std::optional<std::int64_t> advance();
  std::string publish(const Save& save);
  void give_up() noexcept;
  void warn(std::string_view text) const;

  comm::ProcessGroup& world_;
  std::vector<CheckpointPart> parts_;
  CheckpointerOptions options_;
  engine::Stream stream_;  // of meetings
  std::string run_;
  std::unique_ptr<CheckpointFolder> folder_;  // on rank 0
  // Steps of the folder: those whose checkpoint did not verify or is of another step, and those
  // whose checkpoint was found to be of the step that its name says.
  std::set<std::int64_t> rejected_, named_;
  std::unique_ptr<Snapshot> snapshot_;
  std::unique_ptr<Save> save_;  // at work
};

}  // namespace tessera::shard
