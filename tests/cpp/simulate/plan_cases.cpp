#include "plan_cases.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>

using namespace roundpipe::schedule;

namespace plan_cases {

namespace {

using Fields = std::map<std::string, std::string>;

const std::filesystem::path kFolder = ROUNDPIPE_PLAN_CASES;

std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(kFolder / file);
  if (!stream) throw std::runtime_error("cannot read " + (kFolder / file).string());
  return {std::istreambuf_iterator<char>(stream), {}};
}

// The `name = value` of a text, without quotes.
Fields fields_of(const std::string& text) {
  static const std::regex field(R"re((\w+) = "?([^",{}\n]*)"?)re");
  Fields fields;
  for (std::sregex_iterator at(text.begin(), text.end(), field), end; at != end; ++at) fields[(*at)[1]] = (*at)[2];
  return fields;
}

// The parts of a text that begin with a line.
std::vector<std::string> parts_of(const std::string& text, const std::string& line) {
  std::vector<std::string> parts;
  for (std::size_t at = text.find(line); at != std::string::npos;) {
    const std::size_t next = text.find(line, at + line.size());
    parts.push_back(text.substr(at + line.size(), next == std::string::npos ? next : next - at - line.size()));
    at = next;
  }
  return parts;
}

LayerCost layer_of(const std::string& text) {
  Fields fields = fields_of(text);
  const auto bytes = [&](const char* name) { return static_cast<std::int64_t>(std::stod(fields.at(name))); };
  LayerCost cost;
  cost.forward_ms = std::stod(fields.at("forward_ms"));
  cost.backward_ms = std::stod(fields.at("backward_ms"));
  cost.weight_bytes = cost.gradient_bytes = bytes("weight_bytes");
  cost.activation_bytes = bytes("activation_bytes");
  cost.saved_bytes = bytes("saved_bytes");
  return cost;
}

LayerCosts costs_of(const std::string& text) {
  LayerCosts costs;
  std::istringstream lines(text);
  LayerCost head;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("head = ")) head = layer_of(line);
    if (line.starts_with("  {")) costs.push_back(layer_of(line));
  }
  costs.push_back(head);
  return costs;
}

void read_machine(const std::string& text, Case& into) {
  const Fields fields = fields_of(text);
  into.cluster.link_up_gb_per_s = std::stod(fields.at("link_up_gb_per_s"));
  into.cluster.link_down_gb_per_s = std::stod(fields.at("link_down_gb_per_s"));
  into.cluster.host_gb_per_s = std::stod(fields.at("host_gb_per_s"));
  into.rules.update.gb_per_s = std::stod(fields.at("update_gb_per_s"));
  // AdamW with fp32 moments; cases without a rate have no optimizer.
  into.rules.update.traffic = into.rules.update.gb_per_s > 0 ? 13 : 0;
  for (const std::string& part : parts_of(text, "[[devices]]\n")) {
    const Fields device = fields_of(part);
    const ClusterDevice kind{std::stod(device.at("speed")), std::stoll(device.at("memory_bytes"))};
    into.cluster.devices.insert(into.cluster.devices.end(), std::stoul(device.at("count")), kind);
  }
}

Case read(const std::string& name) {
  for (const std::string& part : parts_of(text_of("cases.toml"), "[[cases]]\n")) {
    const Fields fields = fields_of(part);
    if (fields.at("costs") != name + ".toml") continue;
    Case found{name, costs_of(text_of(fields.at("costs"))), {}, {}, std::stoi(fields.at("microbatches"))};
    read_machine(text_of(fields.at("machine")), found);
    found.rules.timing.asynchronous = fields.at("mode") == "async";
    return found;
  }
  throw std::runtime_error("no case " + name);
}

// A preset's layers for microbatches of 2,048 tokens; times and values as in python/roundpipe/plan/costs.py.
Case preset(const std::string& name, int layers, LayerCost layer, LayerCost head, int devices, int microbatches) {
  Case made{name, LayerCosts(static_cast<std::size_t>(layers), layer), {}, {}, microbatches};
  made.costs.push_back(head);
  for (LayerCost& cost : made.costs) {
    cost.forward_ms /= 4;
    cost.backward_ms /= 4;
    cost.gradient_bytes = cost.weight_bytes;
  }
  made.cluster.devices.assign(static_cast<std::size_t>(devices), {1, 24'000'000'000});
  made.cluster.link_up_gb_per_s = made.cluster.link_down_gb_per_s = 25;
  made.cluster.host_gb_per_s = 50;
  return made;
}

}  // namespace

std::vector<Case> named(const std::vector<std::string>& names) {
  std::vector<Case> cases;
  for (const std::string& name : names) {
    if (name == "llama3.1-8b") {
      cases.push_back(preset(name, 32,
                             {.forward_ms = 18.504,
                              .backward_ms = 41.207,
                              .weight_bytes = 435'000'000,
                              .activation_bytes = 2048 * 4096 * 2},
                             {.forward_ms = 37.2255, .backward_ms = 74.501, .weight_bytes = 128'256L * 4096 * 2}, 2,
                             3));
    } else if (name == "qwen3-1.7b") {
      cases.push_back(preset(name, 28,
                             {.forward_ms = 7.429,
                              .backward_ms = 15.831,
                              .weight_bytes = 100'000'000,
                              .activation_bytes = 2048 * 2048 * 2},
                             {.forward_ms = 22.0655, .backward_ms = 43.707, .weight_bytes = 151'936L * 2048 * 2}, 4,
                             5));
      cases.back().rules.timing.asynchronous = false;
    } else {
      cases.push_back(read(name));
    }
  }
  return cases;
}

}  // namespace plan_cases
