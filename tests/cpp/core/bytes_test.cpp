#include <roundpipe/core/bytes.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

using namespace roundpipe;

namespace {

// The message of the error that `parse` throws; empty if it accepts.
template <typename Parse>
std::string refusal(Parse parse) {
  try {
    parse();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("parse_bytes: units of 1024 and of 1000, fractions, a space before the unit") {
  CHECK(parse_bytes("0", "t") == 0);
  CHECK(parse_bytes("512B", "t") == 512);
  CHECK(parse_bytes("64KiB", "t") == 64 * 1024);
  CHECK(parse_bytes("3MiB", "t") == 3 * 1048576);
  CHECK(parse_bytes("2GiB", "t") == int64_t{2} << 30);
  CHECK(parse_bytes("1TiB", "t") == int64_t{1} << 40);
  CHECK(parse_bytes("8KB", "t") == 8000);
  CHECK(parse_bytes("8MB", "t") == 8'000'000);
  CHECK(parse_bytes("8GB", "t") == 8'000'000'000);
  CHECK(parse_bytes("8TB", "t") == 8'000'000'000'000);
  CHECK(parse_bytes("1.5 GiB", "t") == 3 * (int64_t{1} << 29));
  CHECK(parse_bytes("0.5KiB", "t") == 512);
  CHECK(parse_bytes("1e6B", "t") == 1'000'000);
}

TEST_CASE("parse_bytes: anything else is refused with where, the text and an example") {
  for (const char* text : {"",       " ",     "2",    "512",    "1e6", "GiB", "-1",    "-1GiB", "2gib",       "2G",
                           "2 GiB ", "2GiBs", "0x10", "1,5GiB", "nan", "inf", "1e300", "9e18",  "9000000TiB", "two"}) {
    CAPTURE(text);
    const std::string message = refusal([&] { parse_bytes(text, "devices"); });
    CHECK(message.starts_with("[devices] '" + std::string(text) + "' is not a size"));
    CHECK(message.find("2GiB") != std::string::npos);
  }
}

TEST_CASE("parse_gb_per_s: GB/s with and without the unit, MB/s") {
  CHECK(parse_gb_per_s("8GB/s", "t") == 8.0);
  CHECK(parse_gb_per_s("8 GB/s", "t") == 8.0);
  CHECK(parse_gb_per_s("0.25", "t") == 0.25);
  CHECK(parse_gb_per_s("500MB/s", "t") == 0.5);
  for (const char* text : {"", "0", "0GB/s", "-8GB/s", "8GiB/s", "8GB", "8gb/s", "fast", "inf", "nan"}) {
    CAPTURE(text);
    const std::string message = refusal([&] { parse_gb_per_s(text, "devices"); });
    CHECK(message.starts_with("[devices] '" + std::string(text) + "' is not a bandwidth"));
  }
}

TEST_CASE("format_bytes: whole bytes, then two digits of the largest fitting unit") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(1024) == "1.00 KiB");
  CHECK(format_bytes(1536) == "1.50 KiB");
  CHECK(format_bytes(3 * (int64_t{1} << 29)) == "1.50 GiB");
  CHECK(format_bytes(int64_t{1} << 50) == "1024.00 TiB");
  CHECK(format_bytes(-2048) == "-2.00 KiB");
}

TEST_CASE("what format_bytes writes, parse_bytes reads back to half a percent") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    const auto size_bytes = static_cast<int64_t>(random() >> (20 + random() % 44));
    const int64_t again_bytes = parse_bytes(format_bytes(size_bytes), "t");
    CAPTURE(size_bytes);
    CHECK(static_cast<double>(again_bytes) == doctest::Approx(static_cast<double>(size_bytes)).epsilon(0.005));
  }
}

TEST_CASE("align_up: the next multiple, itself when it is one") {
  CHECK(align_up(0, kBlockAlignment_bytes) == 0);
  CHECK(align_up(1, 256) == 256);
  CHECK(align_up(256, 256) == 256);
  CHECK(align_up(257, 256) == 512);
}

TEST_CASE("a Cancelled is an Error, so that callers may catch both at once") {
  CHECK_THROWS_AS(throw Cancelled("given up"), Error);
  CHECK(concat("layer ", 3, ": ", 1.5) == "layer 3: 1.5");
}
