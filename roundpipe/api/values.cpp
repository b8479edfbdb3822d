#include <roundpipe/api/values.h>

#include <c10/util/Type.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

const Structure& Structure::of(const runtime::Values& values) {
  if (!values.structure) throw Error("[values] the tensors have no structure: they were not made by roundpipe::split");
  return *static_cast<const Structure*>(values.structure.get());
}

void Structure::refuse(const runtime::Values& values, const std::type_info& wanted) {
  throw std::invalid_argument(concat("[values] a ", c10::demangle(wanted.name()), " was expected, and the value is a ",
                                     c10::demangle(of(values).type().name()), " of ", values.tensors.size(),
                                     " tensors; make what one side returns and the other takes the same type"));
}

}  // namespace roundpipe
