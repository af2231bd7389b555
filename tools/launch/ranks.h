// Where the ranks of a run work: what its configuration leaves open, decided for this machine.
// Which of them are threads of this process, on which device, and what moves tensors between them:
// what depends on that asks here.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "comm/process_group.h"
#include "engine/stream.h"
#include "tools/config/train_config.h"
#include "tools/io/jsonl.h"
#include "tools/launch/launcher.h"
#include "tools/report/flight_output.h"
#include "tools/report/local_ranks.h"

namespace tessera::tools {

struct Ranks {
  int size = 1;
  int num_gpus = 0;   ///< that those of this process take in turn; 0: the CPU
  int first_gpu = 0;  ///< of these, among those that it sees
  bool nccl = false;
  LocalRanks local = {.world_size = size};
  Launch launch = {};  ///< of several processes each has local.count ranks, with GPUs one on each
  TransportChoice transport = TransportChoice::kAuto;  ///< of several processes, never kAuto

  /// On this machine, in the processes that `launch` tells of: where a launcher has started this
  /// one, parallel.threads in each, also if it is the only one. Throws DeviceError when GPUs are
  /// asked for and the build or the machine has none to use; InvalidArgument for nccl without a GPU
  /// for each rank, for fewer GPUs than ranks of several processes on this host, and for what
  /// several processes cannot do.
  static Ranks choose(const TrainConfig& config, const Launch& launch = {});
  /// Where a plan takes them to be: with device=cuda on a machine with a GPU for each rank, else on
  /// this one. Throws InvalidArgument as choose().
  static Ranks planned(const TrainConfig& config);
  /// All in one process, on a machine with `num_gpus` that may be used. Throws InvalidArgument as
  /// choose().
  static Ranks on(const TrainConfig& config, int num_gpus);

  /// Of a rank of this process. Throws InvalidArgument for another.
  int gpu_of(int rank) const { return first_gpu + static_cast<int>(local.index(rank)) % num_gpus; }
  /// Of a rank of this process.
  engine::Stream compute(int rank, const engine::StreamOptions& options = {}) const;
  bool are_processes() const { return launch.num_processes > 1; }
  /// fn(world) on a thread per rank of this process; ends as comm::run_ranks() does. When the ranks
  /// have failed and one of them does not end, the error is told on stderr, and after the deadline
  /// (at least 2 and at most 60 seconds) the process ends with exit code 1. `flight`, unless it is
  /// null, records what the ranks call, and is written before that.
  void run(const TrainConfig& config, const std::function<void(comm::ProcessGroup&)>& fn,
           FlightOutput* flight = nullptr) const;
  /// What moves tensors between ranks: "threads", "nccl", "mpi", "gloo".
  std::string_view backend() const;
  /// Whether sums over ranks are those of one process, in the order of ranks.
  bool sums_in_rank_order(const ParallelConfig& parallel) const {
    return !nccl || parallel.canonical;
  }
  /// "torchrun: 2 hosts x 2 processes x 2 threads, transport gloo"; empty without a launcher.
  std::string launch_str() const;
  /// Neighbouring ranks that reach each other sooner than others, and where they are: of a
  /// "process" or a "host". 0 where all are alike.
  std::pair<int, std::string_view> replica() const;
  /// Says in `parallel` where they are.
  void place(ParallelConfig& parallel) const;
  /// "cuda, 4 ranks on 2 GPUs, threads", "cpu, 4 ranks, threads, v4+amx, oneDNN 2.6.3"
  std::string str() const;
  /// What str() says, for the log: device, ranks, num_gpus, backend, cpu; and launch_str().
  JsonRecord record() const;
};

}  // namespace tessera::tools
