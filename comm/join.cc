#include "comm/join.h"

#include <string>
#include <utility>
#include <vector>

#include "comm/hand_out.h"
#include "comm/hybrid/hybrid_group.h"
#include "comm/link.h"
#include "comm/messages/message_world.h"
#include "comm/threads/thread_ranks.h"
#include "comm/threads/threads_group.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

std::unique_ptr<Transport> make_transport(const JoinOptions& options, Control& control) {
  auto transport = options.transport(
      {[&](std::string own) { return control.all_gather("connections", std::move(own)); },
       [&] { return control.has_failed(); }});
  check_processes(*transport, options.control);
  return transport;
}

// `transport`: null where it is made only now.
std::shared_ptr<MessageWorld> connect(int num_threads, const JoinOptions& options,
                                      const std::shared_ptr<Control>& control,
                                      std::shared_ptr<Transport> transport) {
  check_equal(*control, "transport", options.transport_name);
  check_equal(*control, "number of threads", std::to_string(num_threads));
  const auto shared = std::make_shared<MessageWorld>();
  for (int r = 0; r < num_threads * options.control.num_processes; ++r) {
    shared->process_of.push_back(r / num_threads);
  }
  shared->transport = transport ? std::move(transport) : make_transport(options, *control);
  Link link = link_world(control, options.deadline, options.on_failure, options.flight);
  shared->world = std::move(link.world);
  shared->peers = std::move(link.peers);
  shared->link = std::move(link.carrier);
  return shared;
}

// The ranks of this process, and the world that they fail with.
struct Joined {
  std::vector<std::unique_ptr<ProcessGroup>> ranks;
  std::shared_ptr<World> world;
};

Joined make_threads(int num_threads, const JoinOptions& options) {
  const auto threads =
      make_world(num_threads, options.deadline, options.on_failure, options.flight);
  Joined joined{.ranks = {}, .world = threads->world()};
  for (int r = 0; r < num_threads; ++r) {
    joined.ranks.push_back(make_threads_group(threads, r, ThreadRank::Kind::kWorld));
  }
  return joined;
}

Joined join_all(int num_threads, const JoinOptions& options) {
  engine::require(num_threads >= 1, "[join] expected at least 1 thread, got {}", num_threads);
  ControlOptions self = options.control;
  if (self.num_processes == 1) {
    engine::require(self.process == 0, "[join] expected process 0 of 1, got {}", self.process);
    return make_threads(num_threads, options);
  }
  std::shared_ptr<Transport> transport;
  if (self.address.empty() && !self.hand_out) {
    self.hand_out = [&](const std::string& own) {
      transport = options.transport([](const std::string&) -> std::vector<std::string> {
        engine::fail("[join] expected an address where processes meet, got none");
      });
      return hand_out(*transport, self, own);
    };
  }
  Joined joined;
  join_over(self, [&](const std::shared_ptr<Control>& control) {
    auto shared = connect(num_threads, options, control, std::move(transport));
    joined.world = shared->world;
    joined.ranks = make_hybrid_groups(std::move(shared));
  });
  return joined;
}

}  // namespace

std::unique_ptr<ProcessGroup> join(const JoinOptions& options) {
  return std::move(join_ranks(1, options)[0]);
}

std::vector<std::unique_ptr<ProcessGroup>> join_ranks(int num_threads, const JoinOptions& options) {
  return join_all(num_threads, options).ranks;
}

void run_joined_ranks(int num_threads, const JoinOptions& options,
                      const std::function<void(ProcessGroup&)>& fn) {
  Joined joined = join_all(num_threads, options);
  run_on_threads(std::move(joined.ranks), *joined.world, fn);
}

}  // namespace tessera::comm
