// What a test sees of launches, and a loss whose backward it can watch.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "tests/shard/toy_model.h"

namespace tessera::testing {

// Told of launches; lets a thread wait for one.
class Watch : public engine::LaunchListener {
 public:
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    const std::lock_guard lock(mutex_);
    seen_.push_back(std::string(record.work.name) + " " + record.work.detail);
    streams_.push_back(record.stream);
    nbytes_[std::string(record.work.name)] += record.work.bytes_written;
    changed_.notify_all();
  }
  bool wait_for(const std::string& launch) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10),
                             [&] { return std::ranges::find(seen_, launch) != seen_.end(); });
  }
  /// Launches whose name and detail start so, on a stream whose name does.
  int count(const std::string& launch, const std::string& stream = "") {
    const std::lock_guard lock(mutex_);
    int count = 0;
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      count += seen_[i].starts_with(launch) && streams_[i].starts_with(stream) ? 1 : 0;
    }
    return count;
  }
  /// What launches of this name wrote.
  std::int64_t nbytes(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return nbytes_[name];
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    seen_.clear();
    streams_.clear();
    nbytes_.clear();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> seen_, streams_;
  std::map<std::string, std::int64_t> nbytes_;
};

// The loss of `model`, calling `fn` in the backward of its first block.
inline engine::Tensor loss_with(engine::Tape& tape, ToyModel& model,
                                const std::function<void()>& fn) {
  return tape.region(model.root, [&] {
    engine::Tensor x = affine(tape, engine::Tensor::zeros(tape.memory(), {40}, engine::DType::kF32),
                              model.scale, nullptr);
    for (const auto& layer : model.layers) {
      x = tape.region(layer->block, [&] {
        const engine::Tensor y = affine(tape, x, layer->weight, &layer->bias);
        if (layer != model.layers.front()) return y;
        const engine::Tensor passed = tape.empty(y.shape(), y.dtype(), "watch");
        engine::copy(passed, y, tape.stream(), "watch");
        tape.record("watch", passed, [&tape, fn, y](const engine::Tensor& dy) {
          fn();
          tape.pass_grad(y, dy);
        });
        return passed;
      });
    }
    return sum(tape, x);
  });
}

// The loss of `model` for zeros, calling `fn(i)` where its block i computes.
inline engine::Tensor loss_calling(engine::Tape& tape, ToyModel& model, std::int64_t numel,
                                   const std::function<void(std::size_t)>& fn) {
  return tape.region(model.root, [&] {
    engine::Tensor x =
        affine(tape, engine::Tensor::zeros(tape.memory(), {numel}, engine::DType::kF32),
               model.scale, nullptr);
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      ToyModel::Layer& layer = *model.layers[i];
      x = tape.region(layer.block, [&] {
        fn(i);
        return affine(tape, x, layer.weight, &layer.bias);
      });
    }
    return sum(tape, x);
  });
}

}  // namespace tessera::testing
