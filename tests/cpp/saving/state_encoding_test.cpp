#include <roundpipe/saving/state_encoding.h>

#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>

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

  TEST_CASE("what only Python has comes back, and arrays of NumPy are read as tensors") {
    const auto find = [](const std::string& /*name*/) { return at::tensor({1.5F, 2.5F}).view(at::kByte); };
    const auto decode = [&](const char* text) { return decode_state(nlohmann::json::parse(text), find, "state.x"); };
    const StateValue array = decode(R"({"array": "a", "dtype": "<f4", "shape": [2, 1]})");
    CHECK(at::equal(array.as_tensor(), at::tensor({1.5F, 2.5F}).reshape({2, 1})));
    for (const char* const text : {R"({"what": 1})", R"({"dict": [[1]]})", R"({"bytes": "a"})", R"({"bytes": "a=bc"})",
                                   R"({"float": "big"})", R"({})"}) {
      CAPTURE(text);
      CHECK_THROWS_AS(decode(text), Error);
    }
    const StateValue large = decode(R"({"int": "99999999999999999999"})");
    const StateValue turned = decode(R"({"number": "a", "dtype": ">f4", "shape": [2]})");
    CHECK_THROWS_AS(large.as_int(), WrongStateType);
    CHECK_THROWS_WITH_AS(turned.as_tensor(), doctest::Contains(">f4"), std::invalid_argument);
    StateEncoder encoder;
    CHECK(encoder.encode(large, "v").dump() == R"({"int":"99999999999999999999"})");
    CHECK(encoder.encode(turned, "v").dump() == R"({"number":"v","dtype":">f4","shape":[2]})");
    CHECK(at::equal(encoder.tensors()[0].second, find("")));
  }

  TEST_CASE("tensors are named by their keys as Python prints them") {
    using Tuple = StateValue::Tuple;
    const at::Tensor tensor = at::ones(1);
    const StateValue value = StateValue::Dict{
        {"a.b", tensor}, {7, tensor},  {1e16, tensor},       {0.1, tensor},
        {true, tensor},  {{}, tensor}, {Tuple{{1}}, tensor}, {Tuple{{"it's", "\"'", "a\\\n", -2.0}}, tensor}};
    StateEncoder encoder;
    const nlohmann::ordered_json encoded = encoder.encode(value, "v");
    const std::vector<std::string> names = tensor_names(nlohmann::json::parse(encoded.dump()));
    const std::vector<std::string> expected{"v.a.b",  "v.7",    "v.1e+16", "v.0.1",
                                            "v.True", "v.None", "v.(1,)",  R"(v.("it's", '"\'', 'a\\\n', -2.0))"};
    CHECK(names == expected);
  }

  TEST_CASE("numbers and texts are printed as Python prints them") {
    using files::python_text;
    const std::vector<std::pair<double, const char*>> numbers{{0.0, "0.0"},
                                                              {-0.0, "-0.0"},
                                                              {3.0, "3.0"},
                                                              {0.1, "0.1"},
                                                              {1e15, "1000000000000000.0"},
                                                              {1e16, "1e+16"},
                                                              {1.5e16, "1.5e+16"},
                                                              {123456.75, "123456.75"},
                                                              {0.0001, "0.0001"},
                                                              {-1.25e-5, "-1.25e-05"},
                                                              {5e-324, "5e-324"},
                                                              {1.7976931348623157e308, "1.7976931348623157e+308"}};
    for (const auto& [number, text] : numbers) CHECK(python_text(number) == text);
    const nlohmann::ordered_json value{
        {"b", {1, 2.5, nullptr, true}}, {"a", "\u00fc\"\n\x7f"}, {"none", nlohmann::ordered_json::object()}};
    CHECK(files::print_json_as_python(value, "x") ==
          R"({"b": [1, 2.5, null, true], "a": "\u00fc\"\n\u007f", "none": {}})");
    CHECK_THROWS_AS(files::print_json_as_python(std::nan(""), "x"), Error);
    CHECK_THROWS_AS(files::print_json_as_python("\xff", "x"), std::invalid_argument);
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
