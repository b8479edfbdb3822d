#include <roundpipe/device/device_spec.h>

#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::device;

namespace {

std::string names(const std::vector<DeviceSpec>& specs) {
  std::string joined;
  for (const DeviceSpec& spec : specs) {
    if (!joined.empty()) joined += ' ';
    joined += spec.name();
  }
  return joined;
}

std::string refusal(const std::string& text) {
  try {
    parse_devices(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("parse_devices: virtual devices are numbered through all groups") {
  CHECK(names(parse_devices("virtual")) == "virtual:0");
  CHECK(names(parse_devices("virtual:3")) == "virtual:0 virtual:1 virtual:2");
  CHECK(names(parse_devices("virtual:2, virtual:1")) == "virtual:0 virtual:1 virtual:2");
}

TEST_CASE("parse_devices: accelerators by ordinal, several workers on one card") {
  CHECK(names(parse_devices("cuda:0,cuda:1")) == "cuda:0 cuda:1");
  CHECK(names(parse_devices("npu")) == "npu:0");
  CHECK(names(parse_devices("cuda:2x3")) == "cuda:2 cuda:2.1 cuda:2.2");
  const std::vector<DeviceSpec> specs = parse_devices("cuda:0,memory=20GiB,cuda:1");
  CHECK_FALSE(specs[0].is_virtual);
  CHECK(specs[0].type == "cuda");
  CHECK(specs[0].memory_bytes == int64_t{20} << 30);
  CHECK(specs[1].index == 1);
  CHECK(specs[1].memory_bytes == 0);
}

TEST_CASE("parse_devices: options hold for every device of the group before them, and no other") {
  const std::vector<DeviceSpec> specs =
      parse_devices("virtual:2,memory=1MiB,link=8GB/s,host=20,threads=3,debug,virtual:1");
  REQUIRE(specs.size() == 3);
  for (int i = 0; i < 2; ++i) {
    CHECK(specs[i].memory_bytes == 1 << 20);
    CHECK(specs[i].link_gb_per_s == 8.0);
    CHECK(specs[i].host_gb_per_s == 20.0);
    CHECK(specs[i].threads == 3);
    CHECK(specs[i].debug);
  }
  CHECK(specs[2].memory_bytes == 0);
  CHECK(specs[2].link_gb_per_s == 0.0);
  CHECK(specs[2].threads == 0);
  CHECK_FALSE(specs[2].debug);
}

TEST_CASE("parse_devices: everything else is refused, with the text, the reason and an example") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "an empty entry"},
      {"virtual:2,", "an empty entry"},
      {",virtual:2", "an empty entry"},
      {"virtual:0", "not a number from 1"},
      {"virtual:-1", "not a number from 1"},
      {"virtual:", "not a number from 1"},
      {"virtual:2x2", "not a number"},
      {"virtual:1000000000000", "not a number"},
      {"cuda:-1", "not a number from 0"},
      {"cuda:0x0", "not a number from 1"},
      {"cuda:0x", "not a number from 1"},
      {"cuda:one", "not a number"},
      {"cpu", "not a device"},
      {"CUDA:0", "not a device"},
      {":3", "not a device"},
      {"memory=1GiB", "before any device"},
      {"debug,virtual:1", "before any device"},
      {"virtual:2,speed=3", "unknown option 'speed=3'"},
      {"virtual:2,debug=yes", "unknown option"},
      {"cuda:0,link=8GB/s", "unknown option"},
      {"cuda:0,debug", "unknown option"},
      {"cuda:0,threads=1", "unknown option"},
      {"virtual:2,threads=0", "not a number from 1"},
      {"virtual:2,memory=0", "holds nothing"},
      {"virtual:1,cuda:0", "of one type"},
      {"cuda:0,npu:0", "of one type"},
      {"cuda:0,cuda:0", "cuda:0 is named twice"},
      {"cuda:0x2,cuda:0", "cuda:0 is named twice"},
      {"virtual:1,virtual:1,host=20", "host= is the bandwidth of all links together"},
      {"virtual:1,host=20,virtual:1,host=10", "host= is the bandwidth of all links together"},
  };
  for (const auto& [text, reason] : cases) {
    CAPTURE(text);
    const std::string message = refusal(text);
    INFO("message: ", message);
    CHECK(message.starts_with("[devices] '"));
    CHECK(message.substr(11).starts_with(text + "'"));
    CHECK(message.find(reason) != std::string::npos);
    CHECK(message.find("'virtual:4,memory=2GiB,link=8GB/s'") != std::string::npos);
  }
  CHECK(refusal("virtual:2,memory=lots").find("'lots' is not a size") != std::string::npos);
  CHECK(refusal("virtual:2,link=0").find("'0' is not a bandwidth") != std::string::npos);
}

TEST_CASE("devices: how links are used") {
  const auto specs = parse_devices("virtual:2,chunk=3MB,fifo,virtual:1");
  REQUIRE(specs.size() == 3);
  for (int i : {0, 1}) {
    CHECK(specs[static_cast<size_t>(i)].chunk_bytes == 3'000'000);
    CHECK(specs[static_cast<size_t>(i)].first_come);
  }
  CHECK(specs[2].chunk_bytes == 64'000'000);
  CHECK_FALSE(specs[2].first_come);
  CHECK(parse_devices("virtual:1,chunk=0").front().chunk_bytes == 0);
  CHECK(parse_devices("cuda:0,fifo").front().first_come);
  CHECK_THROWS_AS(parse_devices("virtual:1,chunk=some"), std::invalid_argument);
  CHECK_THROWS_AS(parse_devices("virtual:1,fifo=yes"), std::invalid_argument);
  CHECK_THROWS_AS(parse_devices("fifo"), std::invalid_argument);
}

TEST_CASE("devices: an option is given once to each group, but for faults") {
  for (const char* twice : {"virtual:2,memory=1GB,memory=2GB", "virtual:1,debug,debug", "cuda:0,fifo,chunk=0,fifo",
                            "virtual:1,memory=1GB,virtual:1,memory=1GB,memory=1GB"}) {
    CHECK_THROWS_WITH_AS(parse_devices(twice), doctest::Contains("is given twice"), std::invalid_argument);
  }
  CHECK(parse_devices("virtual:1,memory=1GB,virtual:1,memory=2GB").back().memory_bytes == 2'000'000'000);
}

TEST_CASE("devices: what frozen weights may take that stay") {
  const auto specs = parse_devices("cuda:0,memory=24GB,resident=0,cuda:1,resident=2GiB,cuda:2");
  CHECK(specs[0].resident_bytes == 0);
  CHECK(specs[1].resident_bytes == int64_t{2} << 30);
  CHECK(specs[2].resident_bytes == -1);
  CHECK(refusal("virtual:1,resident=2").find("'2' is not a size with its unit") != std::string::npos);
}

TEST_CASE("devices: faults to inject, on one device or on all of a group, and a watchdog") {
  const auto specs = parse_devices("virtual:1,virtual:2,fail=error@30,fail=2:slow@5+20ms,watchdog=30s");
  REQUIRE(specs.size() == 3);
  CHECK(specs[0].faults.empty());
  CHECK(specs[0].watchdog_ms == 0);
  REQUIRE(specs[1].faults.size() == 1);
  CHECK(specs[1].faults[0].kind == Fault::Kind::kError);
  CHECK(specs[1].faults[0].at == 30);
  CHECK(specs[1].watchdog_ms == 30'000);
  REQUIRE(specs[2].faults.size() == 2);
  CHECK(specs[2].faults[1].kind == Fault::Kind::kSlow);
  CHECK(specs[2].faults[1].at == 5);
  CHECK(specs[2].faults[1].slow_ms == 20);
  CHECK(parse_fault("hang@1").kind == Fault::Kind::kHang);
  CHECK(parse_fault("bits@2").kind == Fault::Kind::kBits);
  CHECK(parse_devices("cuda:0,watchdog=2min").front().watchdog_ms == 120'000);
  for (const char* text : {"", "error", "error@", "error@0", "error@-1", "error@2x", "fire@3", "slow@3", "slow@3+",
                           "slow@3+5", "slow@+5ms", "hang@99999999999"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_fault(text), std::invalid_argument);
  }
  CHECK(refusal("virtual:2,fail=2:error@1").find("not in the group before it") != std::string::npos);
  CHECK(refusal("virtual:1,virtual:1,fail=0:error@1").find("not in the group before it") != std::string::npos);
  CHECK(refusal("cuda:0,fail=error@1").find("unknown option") != std::string::npos);
  CHECK(refusal("virtual:1,watchdog=30").find("'30' is not a time above 0 with its unit") != std::string::npos);
}
