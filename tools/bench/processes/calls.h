// Collectives between processes, timed in each of them in the same way, whoever carries them out.
#pragma once

#include <cstdint>

#include "engine/tensor.h"

namespace tessera::tools {

/// Of one process, on f32. Each returns when its out is as it will be.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int process() const = 0;
  virtual int num_processes() const = 0;
  virtual void all_gather(const engine::Tensor& in, const engine::Tensor& out) = 0;
  virtual void reduce_scatter(const engine::Tensor& in, const engine::Tensor& out) = 0;
  virtual void all_reduce(const engine::Tensor& in, const engine::Tensor& out) = 0;
  virtual void broadcast(const engine::Tensor& inout, int root) = 0;
};

/// Calls each with each of several lengths, and checks what came of it. Process 0 prints a JSON
/// line a kind of call: its name, the bytes of the whole tensor, and the median of times in us, at
/// most `num_samples` of them, each the mean over several calls in a row. The processes take turns
/// as roots of broadcasts, for one that is always root waits for nobody. Throws CommError for
/// wrong numbers.
void time_calls(Collectives& collectives, std::int64_t num_samples);

}  // namespace tessera::tools
