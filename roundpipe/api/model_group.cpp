#include <roundpipe/api/model_group.h>

namespace roundpipe {

ModelGroup::operator SteppedWeights() const {
  SteppedWeights stepped{{models.begin(), models.end()}, parameters};
  return stepped;
}

}  // namespace roundpipe
