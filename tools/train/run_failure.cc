#include "tools/train/run_failure.h"

#include <exception>
#include <new>
#include <optional>

#include "engine/error.h"
#include "engine/out_of_memory.h"
#include "tools/train/main.h"

namespace tessera::tools {
namespace {

struct Failure {
  std::string message;
  bool is_out_of_memory = false, is_refusal = false;
};

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return {.message = kNoMemory, .is_out_of_memory = true};
  } catch (const engine::OutOfMemory& e) {
    return {.message = e.what(), .is_out_of_memory = true};
  } catch (const engine::InvalidArgument& e) {
    return {.message = e.what(), .is_refusal = true};
  } catch (const engine::IoError& e) {
    return {.message = e.what(), .is_refusal = true};
  } catch (const std::exception& e) {
    return {.message = e.what()};
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

void rethrow_failure(FlightOutput& flight, bool has_begun,
                     const std::function<std::vector<std::string>()>& memory_plan) {
  const std::exception_ptr original = std::current_exception();
  std::optional<engine::Error> told;
  try {
    const Failure failure = failure_of(original);
    if (failure.is_refusal && !has_begun) std::rethrow_exception(original);
    std::string message = failure.message;
    if (failure.is_out_of_memory) add_memory_plan(message, memory_plan);
    add(message, flight.write(failure.message));
    told.emplace(message);
  } catch (...) {  // of another kind, or there is no memory for more
    std::rethrow_exception(original);
  }
  throw *told;
}

}  // namespace tessera::tools
