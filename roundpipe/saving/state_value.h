#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

// A StateValue is not what was asked for.
class ROUNDPIPE_API WrongStateType : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A value of a program's own that a checkpoint holds: nothing, a number, a string, bytes, a tensor, or lists, tuples
// and dictionaries of these. The Python package writes and reads the same values.
// Copies share tensors. Thread safety: one thread at a time.
class StateValue {
 public:
  struct Bytes {
    std::string data;
  };
  // What only Python has: an integer of more than 64 bits, in digits.
  struct LargeInt {
    std::string digits;
  };
  // An array or a number of NumPy: its bytes, and the name of its type, such as "<f4". as_tensor() reads it.
  struct Array {
    at::Tensor bytes;
    std::string dtype;
    std::vector<int64_t> shape;
    bool is_number = false;
  };
  using List = std::vector<StateValue>;
  struct Tuple {
    List items;
  };
  // In the order of its entries.
  using Dict = std::vector<std::pair<StateValue, StateValue>>;
  using Content = std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, at::Tensor, List, Tuple, Dict,
                               LargeInt, Array>;

  StateValue() = default;
  StateValue(bool value) : content_(value) {}
  StateValue(int value) : content_(int64_t{value}) {}
  StateValue(int64_t value) : content_(value) {}
  StateValue(double value) : content_(value) {}
  StateValue(const char* value) : content_(std::string(value)) {}
  StateValue(std::string value) : content_(std::move(value)) {}
  StateValue(Bytes value) : content_(std::move(value)) {}
  StateValue(at::Tensor value) : content_(std::move(value)) {}
  StateValue(List value) : content_(std::move(value)) {}
  StateValue(Tuple value) : content_(std::move(value)) {}
  StateValue(Dict value) : content_(std::move(value)) {}
  StateValue(LargeInt value) : content_(std::move(value)) {}
  StateValue(Array value) : content_(std::move(value)) {}
  // {{"position", 12}, {"seed", 7}}
  static StateValue dict(std::vector<std::pair<std::string, StateValue>> entries);

  const Content& content() const { return content_; }
  bool is_none() const { return std::holds_alternative<std::monostate>(content_); }

  // The value as one type. Throws WrongStateType that names what it is instead. A number without a fraction is
  // read by as_double(), too.
  bool as_bool() const;
  int64_t as_int() const;
  double as_double() const;
  const std::string& as_string() const;
  // Also of an array or a number of NumPy. Throws std::invalid_argument for a type that torch does not have.
  at::Tensor as_tensor() const;
  // Of a list or a tuple.
  const List& items() const;
  const Dict& entries() const;
  // The entry of a dictionary under a string. Throws WrongStateType if there is none; find() returns null then.
  const StateValue& at(std::string_view key) const;
  const StateValue* find(std::string_view key) const;

 private:
  template <typename T>
  const T& as(const char* expected) const;

  Content content_;
};

}  // namespace roundpipe
