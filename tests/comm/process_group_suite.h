// The conformance suite of process groups: what every backend promises, on every device. A test
// program links it and instantiates ProcessGroupTest with its backends, and ComparedCallsTest with
// those that compare each call before they move anything.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/process_group.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::comm {

using std::chrono::milliseconds;

constexpr milliseconds kLong = std::chrono::hours(1);  // a test that waits for it fails

// What a rank does in a test, and says to the test about it.
using RankFunction = std::function<std::string(ProcessGroup&)>;

inline Stream here_on_cpu(int, std::string name, engine::StreamOptions options) {
  return Stream::inline_cpu(std::move(name), options);
}
inline Stream beside_on_cpu(int, std::string name, engine::StreamOptions options) {
  return Stream::worker_cpu(std::move(name), options);
}

// How to run ranks on a backend, and where they work.
struct Backend {
  std::string name;
  // Runs the function once a rank, wherever ranks of this backend are, and returns what each says.
  // Nothing else that it does has to be seen by the caller.
  std::function<std::vector<std::string>(int size, milliseconds deadline, const RankFunction&)> run;
  // A stream of rank `rank` of the world: in the calling thread where that is
  // possible, or in one of its own.
  std::function<Stream(int rank, std::string name, engine::StreamOptions)> here = here_on_cpu,
                                                                           beside = beside_on_cpu;
  std::int64_t num_large = 100003;  // elements that make a backend cut a tensor into chunks
  milliseconds deadline{50};        // for a test that waits for it
  std::vector<int> sizes = {1, 2, 3, 4, 8};  // of the worlds of tests that try several
};

inline std::string backend_name(const ::testing::TestParamInfo<Backend>& info) {
  return info.param.name;
}

// A stream and its memory.
struct Place {
  Stream stream;
  engine::Memory memory = engine::Memory(stream);
};

class ProcessGroupTest : public ::testing::TestWithParam<Backend> {
 protected:
  static void run(int size, const std::function<void(ProcessGroup&)>& fn,
                  milliseconds deadline = kLong) {
    GetParam().run(size, deadline, [&](ProcessGroup& group) {
      fn(group);
      return std::string();
    });
  }

  static Place place(int rank, engine::StreamOptions options = {}) {
    return {GetParam().here(rank, "comm", options)};
  }
  // With random delays.
  static Place delayed_place(int rank, std::uint64_t seed) {
    return {GetParam().beside(rank, "comm", {.delay_seed = seed})};
  }

  static std::vector<std::int64_t> numels() { return {0, 1, 3, 1000, GetParam().num_large}; }
  // What moves: all dtypes; two odd ones where it takes long.
  static std::vector<engine::DType> dtypes_for(std::int64_t numel) {
    if (numel > 1000) return {engine::DType::kBF16, engine::DType::kU8};
    return {engine::DType::kF32, engine::DType::kBF16, engine::DType::kI32, engine::DType::kI64,
            engine::DType::kU8};
  }

  // What each rank's CommError says; empty where there is none.
  static std::vector<std::string> errors(int size, const std::function<void(ProcessGroup&)>& fn,
                                         milliseconds deadline = kLong) {
    return GetParam().run(size, deadline, [&](ProcessGroup& group) -> std::string {
      try {
        fn(group);
        return "";
      } catch (const CommError& error) {
        return error.what();
      }
    });
  }
};

// Of backends that compare each call before they move anything.
class ComparedCallsTest : public ProcessGroupTest {};

// What a rank calls, to be mixed up. Each call is waited for, and believed if check() lets it.
struct Caller {
  ProcessGroup& group;
  Place place;
  bool waits = true;

  Tensor make(std::int64_t numel, engine::DType dtype = engine::DType::kF32) const {
    return Tensor::zeros(place.memory, {numel}, dtype, "t");
  }
  void wait() const {
    place.stream.synchronize();
    group.check();
  }
  void gather(std::int64_t n, std::string_view label,
              engine::DType dtype = engine::DType::kF32) const {
    group.all_gather(make(n, dtype), make(n * group.size(), dtype), place.stream, label);
    if (waits) wait();
  }
  void scatter(std::int64_t n, std::string_view label, engine::DType dtype = engine::DType::kF32,
               Accumulate accumulate = Accumulate::kNo) const {
    group.reduce_scatter(make(n * group.size(), dtype), make(n), accumulate, place.stream, label);
    if (waits) wait();
  }
  void reduce(std::int64_t n, std::string_view label, Accumulate accumulate) const {
    group.all_reduce(make(n), make(n), accumulate, place.stream, label);
    if (waits) wait();
  }
};

}  // namespace tessera::comm
