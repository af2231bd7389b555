// What a pause of one process is for the others, whatever is between them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "comm/process_group.h"
#include "tests/comm/control_processes.h"

namespace tessera::comm {

/// Nobody gives up while one pauses for longer than the deadline. `join_all(deadline, body)` starts
/// processes that join, do `body(group, say)`, leave, and say "left".
template <class F>
void expect_pause_holds_for_all(const F& join_all) {
  auto children = join_all(milliseconds(1000), [](ProcessGroup& group, const Child::Say& say) {
    group.barrier("begin");
    if (group.rank() == 1) {
      const auto pause = group.pause_deadline();
      std::this_thread::sleep_for(milliseconds(2500));
    }
    group.barrier("written");
    say("went on");
  });
  for (Child& child : children) {
    EXPECT_EQ(child.hear(), "went on");
    EXPECT_EQ(child.hear(), "left");
  }
}

}  // namespace tessera::comm
