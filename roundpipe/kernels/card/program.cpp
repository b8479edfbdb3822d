#include <roundpipe/kernels/card/program.h>

#include <optional>

#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>
#include <roundpipe/kernels/entries.h>
#include <roundpipe/kernels/kernels.h>

namespace roundpipe::kernels::card {
namespace {

// And that a card's structs are as large as the host's, which are passed to it.
std::string whole_source() {
  std::string source(card_source());
  for (const Entry* entry : entries()) {
    source += concat("static_assert(sizeof(", entry->type, ") == ", entry->bytes, ", \"", entry->name, "\");\n");
  }
  return source;
}

}  // namespace

std::string program_for(const Compiler& compiler, const std::string& architecture, const ProgramCache& cache) {
  const std::string source = whole_source();
  const auto options = compiler.options_for(architecture);
  std::string key = concat("roundpipe kernels ", fingerprint(source.data(), source.size()), " by ", compiler.name());
  for (const std::string& option : options) key += " " + option;
  if (std::optional<std::string> kept = cache.find(key)) return *kept;
  const std::string program = compiler.compile(source, options);
  cache.keep(key, program);
  return program;
}

}  // namespace roundpipe::kernels::card
