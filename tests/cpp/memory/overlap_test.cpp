#include <roundpipe/memory/overlap.h>

#include <stdexcept>

#include <ATen/ops/ones.h>
#include <doctest/doctest.h>

namespace overlap_test {

using roundpipe::memory::NamedTensor;
using roundpipe::memory::refuse_overlap;

at::Tensor trained(at::Tensor tensor) { return tensor.detach().requires_grad_(true); }

TEST_CASE("overlap: parameters in the same memory, of which one is trained, are refused by their names") {
  const at::Tensor whole = at::ones({4, 6});
  const NamedTensor a{"a", trained(whole)}, other{"other", trained(at::ones({4, 6}))};
  for (const at::Tensor& shared : {trained(whole), whole.detach(), trained(whole.narrow(0, 2, 2))}) {
    for (const std::vector<NamedTensor>& order :
         {std::vector<NamedTensor>{a, other, {"b", shared}}, std::vector<NamedTensor>{{"b", shared}, other, a}}) {
      CHECK_THROWS_AS(refuse_overlap(order), std::invalid_argument);
    }
  }
  CHECK_THROWS_WITH_AS(refuse_overlap({a, other, {"b", trained(whole)}}), doctest::Contains("'a' and 'b'"),
                       std::invalid_argument);
}

TEST_CASE("overlap: parts of one tensor, one parameter named twice and frozen parameters do not overlap") {
  const at::Tensor whole = at::ones({4, 6});
  refuse_overlap({{"a", trained(whole.narrow(0, 0, 2))}, {"b", trained(whole.narrow(0, 2, 2))}});
  refuse_overlap({{"even", trained(whole.slice(1, 0, 6, 2))}, {"odd", trained(whole.slice(1, 1, 6, 2))}});
  const NamedTensor a{"a", trained(whole)};
  refuse_overlap({a, {"b", a.tensor}});
  refuse_overlap({{"a", whole.detach()}, {"b", whole.detach()}});
  refuse_overlap({{"none", trained(at::ones({0, 6}))}, {"none too", trained(at::ones({0}))}});
  // A tensor around another one.
  refuse_overlap({{"around", trained(whole.slice(0, 0, 4, 3))}, {"between", trained(whole.narrow(0, 1, 1))}});
}

}  // namespace overlap_test
