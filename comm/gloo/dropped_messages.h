// Messages that nobody waits for, kept until they are done. Private to comm.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/gloo/plugin.h"

namespace tessera::comm {

/// A message of the plug-in, and what keeps its bytes alive.
struct PostedMessage {
  gloo_plugin::Message* message = nullptr;
  std::shared_ptr<const void> owner;
};

/// Frees messages and their owners once Gloo needs neither. A thread looks for that, from the first
/// message on that is not done when it is dropped; where none can be started, close() frees them.
class DroppedMessages {
 public:
  explicit DroppedMessages(const gloo_plugin::Functions& functions) : functions_(functions) {}
  ~DroppedMessages() { close(); }
  DroppedMessages(const DroppedMessages&) = delete;
  DroppedMessages& operator=(const DroppedMessages&) = delete;

  const gloo_plugin::Functions& functions() const { return functions_; }
  void take(PostedMessage message);
  /// Frees all; their mesh is closed.
  void close();

 private:
  void watch();

  const gloo_plugin::Functions& functions_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<PostedMessage> messages_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
