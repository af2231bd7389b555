#include "tools/report/run_failure.h"

#include <exception>
#include <new>
#include <optional>

#include "engine/error.h"
#include "engine/out_of_memory.h"
#include "tools/cli/main.h"

namespace tessera::tools {
namespace {

enum class Kind { kOutOfMemory, kRefusal, kTryAgain, kOther };

Kind kind_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return Kind::kOutOfMemory;
  } catch (const engine::OutOfMemory&) {
    return Kind::kOutOfMemory;
  } catch (const engine::InvalidArgument&) {
    return Kind::kRefusal;
  } catch (const engine::IoError&) {
    return Kind::kRefusal;
  } catch (const TryAgain&) {
    return Kind::kTryAgain;
  } catch (const std::exception&) {
    return Kind::kOther;
  }
}

void add(std::string& message, const std::string& line) {
  message += "\n  ";
  message += line;
}

void add_memory_plan(std::string& message,
                     const std::function<std::vector<std::string>()>& memory_plan) {
  try {
    const std::vector<std::string> lines = memory_plan();
    add(message, "the plan of this run:");
    for (const std::string& line : lines) add(message, "  " + line);
  } catch (const std::exception& e) {
    add(message, "the plan of this run is not known: ");
    message += e.what();
  }
}

}  // namespace

void rethrow_failure(FlightOutput& flight, const RankErrors& errors, bool has_begun,
                     const std::function<std::vector<std::string>()>& memory_plan) {
  const std::exception_ptr original = std::current_exception();
  std::optional<engine::Error> told;
  Kind kind = Kind::kOther;
  try {
    kind = kind_of(original);
    // Processes that have not met have no group either.
    const bool has_met = !flight.recorder()->read().groups.empty();
    if (!has_begun && (kind == Kind::kRefusal || !has_met)) std::rethrow_exception(original);
    const std::string error = errors.named(message_of(original));
    std::string message = error;
    if (kind == Kind::kOutOfMemory) add_memory_plan(message, memory_plan);
    add(message, flight.write(error));
    told.emplace(message);
  } catch (...) {  // of another kind, or there is no memory for more
    std::rethrow_exception(original);
  }
  if (kind == Kind::kTryAgain) throw TryAgain(told->what());
  throw *told;
}

}  // namespace tessera::tools
