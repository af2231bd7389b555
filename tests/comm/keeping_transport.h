// A transport that loses what one end sends, for tests of what lies above transports.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "comm/transport/transport.h"

namespace tessera::comm {

// Takes what is sent after the fingerprints, and never hands it on.
class KeepingTransport final : public Transport {
 public:
  explicit KeepingTransport(std::unique_ptr<Transport> transport)
      : transport_(std::move(transport)) {}
  std::string str() const override { return transport_->str(); }
  int process() const override { return transport_->process(); }
  int num_processes() const override { return transport_->num_processes(); }
  std::unique_ptr<Transfer> send(int process, std::uint32_t tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    if (tag % 2 == 1) return std::make_unique<Done>();
    return transport_->send(process, tag, bytes, std::move(owner));
  }
  std::unique_ptr<Transfer> receive(int process, std::uint32_t tag, std::span<std::byte> bytes,
                                    std::shared_ptr<const void> owner) override {
    return transport_->receive(process, tag, bytes, std::move(owner));
  }

 private:
  struct Done : Transfer {
    bool wait_for(std::chrono::milliseconds) override { return true; }
  };
  std::unique_ptr<Transport> transport_;
};

}  // namespace tessera::comm
