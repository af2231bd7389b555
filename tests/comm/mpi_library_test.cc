// What is said where there is no MPI to be used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "comm/mpi/mpi_transport.h"
#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

TEST(MpiLibraryTest, NamesWhatWasLookedFor) {
  const std::string error = testing::error_of<engine::DeviceError>(
      [] { make_mpi_transport({.library_path = "/nowhere/libmpi.so"}); });
  EXPECT_THAT(error, HasSubstr("expected an MPI library, got: /nowhere/libmpi.so: "));
}

TEST(MpiLibraryTest, RefusesWhatIsNoMpi) {
  const std::string error = testing::error_of<engine::DeviceError>(
      [] { make_mpi_transport({.library_path = "libc.so.6"}); });
  EXPECT_THAT(error, HasSubstr("expected libc.so.6 to have MPI_Get_library_version"));
}

TEST(MpiLibraryTest, RefusesChunksThatMpiCannotCount) {
  for (const std::size_t nbytes : {std::size_t{0}, std::size_t{1} << 31}) {
    EXPECT_THROW(make_mpi_transport({.chunk_nbytes = nbytes}), engine::InvalidArgument);
  }
}

}  // namespace
}  // namespace tessera::comm
