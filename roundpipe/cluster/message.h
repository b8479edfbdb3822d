#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include <roundpipe/core/error.h>

namespace roundpipe::cluster {

// Numbers and texts, one behind the other, as the bytes of a message between the ranks, which run the same program.
class Message {
 public:
  template <typename Number>
    requires std::is_arithmetic_v<Number>
  Message& add(Number number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
    return *this;
  }
  Message& add(std::string_view text) {
    add(static_cast<uint64_t>(text.size()));
    bytes_.append(text);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads a message in the order in which it was written. Throws Error if it is shorter. `bytes` must outlive it.
class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : left_(bytes) {}

  template <typename Number>
  Number number() {
    Number number{};
    std::memcpy(&number, take(sizeof(number)).data(), sizeof(number));
    return number;
  }
  std::string text() { return std::string(take(number<uint64_t>())); }
  bool is_at_end() const { return left_.empty(); }

 private:
  std::string_view take(uint64_t size) {
    if (size > left_.size()) {
      throw Error(
          "[distributed] a message of another rank is not one of this version of roundpipe, expected the same program "
          "on every rank; install the same version on all of them");
    }
    const std::string_view taken = left_.substr(0, size);
    left_.remove_prefix(size);
    return taken;
  }

  std::string_view left_;
};

}  // namespace roundpipe::cluster
