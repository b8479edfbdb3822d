#include <roundpipe/device/fp16_accumulation.h>

#include <cstdlib>
#include <stdexcept>

#include <ATen/Context.h>
#include <doctest/doctest.h>

using namespace roundpipe::device;

namespace {

bool is_on() { return at::globalContext().allowFP16AccumulationCuBLAS(); }
void set(bool on) { at::globalContext().setAllowFP16AccumulationCuBLAS(on); }

}  // namespace

TEST_SUITE("fp16 accumulation") {
  TEST_CASE("the switch turns for a pool, and back") {
    set(false);
    Fp16AccumulationSwitch torch;
    CHECK(torch.turns(true));
    torch.turn(true);
    CHECK(is_on());
    CHECK_FALSE(torch.turns(true));
    torch.turn(true);  // the next pool wants the same
    CHECK(torch.turns(false));
    torch.restore();
    CHECK_FALSE(is_on());
    CHECK_FALSE(torch.turns(false));
  }

  TEST_CASE("what the program has set comes back") {
    set(true);
    Fp16AccumulationSwitch torch;
    torch.turn(false);
    CHECK(is_on());
    torch.turn(true);
    torch.restore();
    CHECK(is_on());
    torch.turn(true);
    set(false);  // the program's own choice
    torch.restore();
    CHECK_FALSE(is_on());
  }

  TEST_CASE("a switch that is not as the pool was made is refused") {
    set(true);
    CHECK_NOTHROW(require_fp16_accumulation(true));
    CHECK_THROWS_WITH_AS(require_fp16_accumulation(false), doctest::Contains("is True, and the pool was made without"),
                         std::invalid_argument);
    set(false);
    CHECK_NOTHROW(require_fp16_accumulation(false));
    CHECK_THROWS_WITH_AS(require_fp16_accumulation(true), doctest::Contains("is False, and the pool was made with "),
                         std::invalid_argument);
  }

  TEST_CASE("the variable asks for it with 1, and with nothing else") {
    const char* const name = "ROUNDPIPE_FP16_ACCUMULATION";
    unsetenv(name);
    CHECK_FALSE(wants_fp16_accumulation());
    setenv(name, "0", 1);
    CHECK_FALSE(wants_fp16_accumulation());
    setenv(name, "1", 1);
    CHECK(wants_fp16_accumulation());
    for (const char* const odd : {"", "yes", "11"}) {
      setenv(name, odd, 1);
      CHECK_THROWS_WITH_AS(wants_fp16_accumulation(), doctest::Contains("expected 0 or 1"), std::invalid_argument);
    }
    unsetenv(name);
  }

  TEST_CASE("a training that goes on otherwise is told how it keeps its bits") {
    CHECK(changed_fp16_accumulation(true, true).empty());
    CHECK(changed_fp16_accumulation(false, false).empty());
    CHECK(changed_fp16_accumulation(true, false).find("FP16_ACCUMULATION=1 keeps") != std::string::npos);
    CHECK(changed_fp16_accumulation(false, true).find("checkpoint without") != std::string::npos);
  }
}
