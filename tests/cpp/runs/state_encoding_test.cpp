#include <roundpipe/runs/state_encoding.h>

#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

using namespace roundpipe;

namespace {

StateValue there_and_back(const StateValue& value) {
  StateEncoder encoder;
  const std::string text = encoder.encode(value, "v").dump();
  const auto tensors = encoder.tensors();
  return decode_state(
      nlohmann::json::parse(text),
      [&](const std::string& name) {
        for (const auto& [own, tensor] : tensors) {
          if (own == name) return tensor;
        }
        throw Error("no such tensor");
      },
      "v");
}

}  // namespace

TEST_SUITE("state encoding") {
  TEST_CASE("values come back as they were") {
    using Bytes = StateValue::Bytes;
    const StateValue value =
        StateValue::dict({{"none", {}},
                          {"flag", true},
                          {"integer", int64_t{-9007199254740993}},
                          {"float", 0.1},
                          {"whole", 2.0},
                          {"nan", std::nan("")},
                          {"infinite", -std::numeric_limits<double>::infinity()},
                          {"text", "Zür\"ich\n"},
                          {"list", StateValue::List{1, StateValue::Tuple{{2, "b"}}, StateValue::List{}}},
                          {"tensor", at::arange(6).reshape({2, 3})},
                          {"numbers", StateValue::Dict{{7, 1}, {true, 2}}}});
    const StateValue back = there_and_back(value);
    CHECK(back.at("none").is_none());
    CHECK(back.at("flag").as_bool());
    CHECK(back.at("integer").as_int() == -9007199254740993);
    CHECK(back.at("float").as_double() == 0.1);
    CHECK(std::holds_alternative<double>(back.at("whole").content()));
    CHECK(std::isnan(back.at("nan").as_double()));
    CHECK(back.at("infinite").as_double() < 0);
    CHECK(back.at("text").as_string() == "Zür\"ich\n");
    CHECK(std::holds_alternative<StateValue::Tuple>(back.at("list").items().at(1).content()));
    CHECK(back.at("list").items().at(1).items().at(1).as_string() == "b");
    CHECK(at::equal(back.at("tensor").as_tensor(), at::arange(6).reshape({2, 3})));
    CHECK(back.at("numbers").entries().at(0).first.as_int() == 7);
    CHECK(back.at("numbers").entries().at(1).first.as_bool());
    for (size_t length = 0; length < 7; ++length) {
      std::string data;
      for (size_t i = 0; i < length; ++i) data += static_cast<char>(251 * i + 128);
      CHECK(std::get<Bytes>(there_and_back(Bytes{data}).content()).data == data);
    }
  }

  TEST_CASE("arrays of NumPy are read as tensors, and what only Python has is refused") {
    const auto find = [](const std::string& /*name*/) { return at::tensor({1.5F, 2.5F}).view(at::kByte); };
    const auto decode = [&](const char* text) { return decode_state(nlohmann::json::parse(text), find, "state.x"); };
    const StateValue array = decode(R"({"array": "a", "dtype": "<f4", "shape": [2, 1]})");
    CHECK(at::equal(array.as_tensor(), at::tensor({1.5F, 2.5F}).reshape({2, 1})));
    for (const char* const text : {R"({"what": 1})", R"({"dict": [[1]]})", R"({"bytes": "a"})", R"({"bytes": "a=bc"})",
                                   R"({"float": "big"})", R"({})"}) {
      CAPTURE(text);
      CHECK_THROWS_AS(decode(text), Error);
    }
    // No damage: Python loads them.
    for (const char* const text :
         {R"({"array": "a", "dtype": ">f4", "shape": [2]})", R"({"int": "99999999999999999999"})"}) {
      CAPTURE(text);
      CHECK_THROWS_AS(decode(text), std::invalid_argument);
    }
  }

  TEST_CASE("what cannot be saved is refused with its path") {
    StateValue deep;
    for (int i = 0; i < 70; ++i) deep = StateValue::List{deep};
    StateEncoder encoder;
    CHECK_THROWS_WITH_AS(encoder.encode(deep, "state.deep"), doctest::Contains("state.deep[0]"), std::invalid_argument);
    CHECK_THROWS_WITH_AS(encoder.encode(StateValue::List{"\xff"}, "state.text"), doctest::Contains("state.text[0]"),
                         std::invalid_argument);
    CHECK_THROWS_AS(encoder.encode(at::eye(2).to_sparse(), "state.sparse"), std::invalid_argument);
    const at::Tensor tensor = at::ones(2);
    encoder.encode(tensor, "twice");
    encoder.encode(tensor, "twice");
    CHECK(encoder.tensors().size() == 2);
    CHECK(encoder.tensors()[1].first == "twice#1");
    CHECK_FALSE(encoder.tensors()[0].second.is_alias_of(tensor));
  }
}
