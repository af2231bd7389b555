// A system that starts no more threads: pthread_create() of the whole process, for tests that link
// this.
#pragma once

namespace tessera::testing {

/// Lets `num` more threads start; -1: any number.
void allow_threads(int num);

}  // namespace tessera::testing
