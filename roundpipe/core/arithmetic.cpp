#include <roundpipe/core/arithmetic.h>

#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

Arithmetic parse_arithmetic(std::string_view name) {
  if (name == "exact") return Arithmetic::kExact;
  if (name == "fast") return Arithmetic::kFast;
  throw std::invalid_argument(concat("[arithmetic] the arithmetic is '", name, "', expected exact or fast"));
}

std::string_view arithmetic_name(Arithmetic arithmetic) { return arithmetic == Arithmetic::kExact ? "exact" : "fast"; }

std::string changed_arithmetic(std::string_view saved, Arithmetic own, const std::string& model) {
  const std::string_view before = saved.empty() ? arithmetic_name(Arithmetic::kExact) : saved;
  if (before == arithmetic_name(own)) return {};
  return concat("[load_checkpoint] ", model, " computes in ", arithmetic_name(own),
                " arithmetic, and the checkpoint in ", before,
                ": results are not those of a run that was never interrupted; arithmetic=\"", before, "\" keeps them");
}

}  // namespace roundpipe
