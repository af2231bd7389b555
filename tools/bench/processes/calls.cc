#include "tools/bench/processes/calls.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/memory.h"
#include "tools/io/jsonl.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::Memory;
using engine::Shape;
using engine::Tensor;

constexpr std::int64_t kLargest = 40'000'000;
// About: of calls in a row, which make one sample, and of all samples of a call.
constexpr double kSampleMs = 2, kCallMs = 150;

struct Call {
  std::string name;
  std::function<void(int turn)> run;
  Tensor out;
  std::vector<float> expected;  // the first element of each process's block of `out`
};

Tensor filled(std::int64_t numel, float value, const char* name) {
  const std::vector<float> values(static_cast<std::size_t>(numel), value);
  return Tensor::from<float>(Memory(), Shape{numel}, values, name);
}

void check(const Call& call, std::int64_t nbytes) {
  const std::int64_t block = call.out.numel() / std::ssize(call.expected);
  for (std::int64_t b = 0; b < std::ssize(call.expected); ++b) {
    for (const std::int64_t i : {b * block, (b + 1) * block - 1}) {
      const float got = call.out.data<float>()[i];
      const float expected = call.expected[static_cast<std::size_t>(b)];
      engine::require<engine::CommError>(got == expected,
                                         "[bench] expected {} at {} of {} of {} bytes, got {}",
                                         expected, i, call.name, nbytes, got);
    }
  }
}

// Process 0's `value`.
float agreed(Collectives& collectives, double value) {
  const Tensor one = filled(1, static_cast<float>(value), "agreed");
  collectives.broadcast(one, 0);
  return *one.data<float>();
}

void time_call(Collectives& collectives, const Call& call, std::int64_t nbytes,
               std::int64_t num_samples) {
  int turn = 0;
  const auto ms_of = [&](std::int64_t num_calls) {
    const Timer timer;
    for (std::int64_t i = 0; i < num_calls; ++i) call.run(turn++);
    return timer.ms();
  };
  constexpr int kFirst = 3;  // do not count
  const double one_ms = agreed(collectives, ms_of(kFirst) / kFirst);
  const auto in_a_row = static_cast<std::int64_t>(std::max(1.0, kSampleMs / one_ms));
  const auto num_affordable =
      static_cast<std::int64_t>(kCallMs / (one_ms * static_cast<double>(in_a_row)));
  std::vector<double> us;
  for (std::int64_t s = 0; s < std::clamp<std::int64_t>(num_affordable, 1, num_samples); ++s) {
    us.push_back(ms_of(in_a_row) * 1e3 / static_cast<double>(in_a_row));
  }
  check(call, nbytes);
  if (collectives.process() != 0) return;
  std::cout << JsonRecord()
                   .add("call", call.name)
                   .add("nbytes", nbytes)
                   .add("us", median(std::move(us)))
                   .line()
            << std::flush;
}

}  // namespace

void time_calls(Collectives& collectives, std::int64_t num_samples) {
  const int num = collectives.num_processes();
  std::vector<float> numbers;
  float sum = 0;
  for (int p = 0; p < num; ++p) {
    numbers.push_back(static_cast<float>(p + 1));
    sum += numbers.back();
  }
  const float own = numbers[static_cast<std::size_t>(collectives.process())];
  const Tensor large = filled(kLargest / 4, 1, "large");
  for (int root = 0; root < num; ++root) collectives.broadcast(large, root);  // opens TCP's windows
  for (const std::int64_t nbytes : {std::int64_t{1024}, std::int64_t{1} << 20, kLargest}) {
    const std::int64_t whole = nbytes / 4 / num * num;
    const Tensor part = filled(whole / num, own, "part"), in = filled(whole, own, "in");
    const Tensor out = filled(whole, 0, "out"), own_out = filled(whole / num, 0, "own_out");
    const Tensor same = filled(whole, 1, "same");
    const std::vector<Call> calls = {
        {"all_gather", [&](int) { collectives.all_gather(part, out); }, out, numbers},
        {"reduce_scatter", [&](int) { collectives.reduce_scatter(in, own_out); }, own_out, {sum}},
        {"all_reduce", [&](int) { collectives.all_reduce(in, out); }, out, {sum}},
        {"broadcast", [&](int turn) { collectives.broadcast(same, turn % num); }, same, {1}}};
    for (const Call& call : calls) time_call(collectives, call, nbytes, num_samples);
  }
}

}  // namespace tessera::tools
