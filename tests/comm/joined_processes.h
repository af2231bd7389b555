// Processes of this machine that comm::join() makes ranks of, over Gloo.
#pragma once

#include <chrono>
#include <random>
#include <string>

#include "comm/gloo/gloo_transport.h"
#include "comm/join.h"
#include "tests/comm/control_processes.h"

namespace tessera::comm {

/// Where the processes of one job meet, and what they prove to each other. Made before they are.
class MeetingPlace {
 public:
  explicit MeetingPlace(int num_processes) : num_processes_(num_processes) {
    std::random_device random;
    for (int i = 0; i < 4; ++i) secret_ += std::to_string(random());
  }

  /// Of process `process`. `deadline`: of calls, and to join.
  JoinOptions options(int process, milliseconds deadline) const {
    return {.control = {.process = process,
                        .num_processes = num_processes_,
                        .address = address_,
                        .secret = secret_,
                        .job = "job",
                        .deadline = deadline},
            .transport =
                [process, num = num_processes_](const AllGatherTexts& all_gather) {
                  return make_gloo_transport({.process = process,
                                              .num_processes = num,
                                              .all_gather = all_gather,
                                              .host = "127.0.0.1",
                                              .plugin_path = find_gloo_plugin("/proc/self/exe")});
                },
            .deadline = deadline};
  }

 private:
  int num_processes_;
  std::string address_ = tcp() + "+15", secret_;
};

}  // namespace tessera::comm
