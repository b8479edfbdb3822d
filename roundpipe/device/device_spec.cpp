#include <roundpipe/device/device_spec.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

namespace roundpipe::device {
namespace {

constexpr int kMostDevices = 1024;

[[noreturn]] void refuse(std::string_view text, std::string_view why) {
  throw std::invalid_argument(concat("[devices] '", text, "': ", why,
                                     "; write for example 'virtual:4,memory=2GiB,link=8GB/s' or 'cuda:0,cuda:1'"));
}

int parse_int(std::string_view digits, std::string_view text, int least) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size() || value < least || value > kMostDevices) {
    refuse(text, concat("'", digits, "' is not a number from ", least, " to ", kMostDevices));
  }
  return value;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<DeviceSpec> parse_group(std::string_view item, std::string_view text, int first_virtual) {
  const size_t colon = item.find(':');
  const std::string_view type = item.substr(0, colon);
  const std::string_view rest = colon == std::string_view::npos ? "" : item.substr(colon + 1);
  const bool letters = !type.empty() && std::all_of(type.begin(), type.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || c == '_' || (c >= '0' && c <= '9');
  });
  if (!letters || type == "cpu") refuse(text, concat("'", item, "' is not a device"));
  std::vector<DeviceSpec> group;
  if (type == "virtual") {
    const int count = colon == std::string_view::npos ? 1 : parse_int(rest, text, 1);
    for (int i = 0; i < count; ++i) {
      DeviceSpec spec;
      spec.index = first_virtual + i;
      group.push_back(spec);
    }
    return group;
  }
  const size_t times = rest.find('x');
  const int index = rest.empty() ? 0 : parse_int(rest.substr(0, times), text, 0);
  const int count = times == std::string_view::npos ? 1 : parse_int(rest.substr(times + 1), text, 1);
  for (int replica = 0; replica < count; ++replica) {
    DeviceSpec spec;
    spec.is_virtual = false;
    spec.type = std::string(type);
    spec.index = index;
    spec.replica = replica;
    group.push_back(spec);
  }
  return group;
}

void apply_option(std::string_view item, std::string_view text, std::vector<DeviceSpec>& specs, size_t group_first) {
  const size_t equals = item.find('=');
  const std::string_view key = item.substr(0, equals);
  const std::string_view value = equals == std::string_view::npos ? "" : item.substr(equals + 1);
  if (specs.empty()) refuse(text, concat("option '", item, "' comes before any device"));
  for (size_t i = group_first; i < specs.size(); ++i) {
    DeviceSpec& spec = specs[i];
    if (key == "memory") {
      spec.memory_bytes = parse_bytes(value, "devices");
      if (spec.memory_bytes == 0) refuse(text, "a memory cap of 0 holds nothing");
    } else if (key == "chunk") {
      spec.chunk_bytes = parse_bytes(value, "devices");
    } else if (key == "resident") {
      spec.resident_bytes = parse_bytes(value, "devices");
    } else if (key == "fifo" && value.empty()) {
      spec.first_come = true;
    } else if (key == "watchdog") {
      spec.watchdog_ms = parse_duration_ms(value, "devices");
    } else if (key == "fail" && spec.is_virtual) {
      const size_t colon = value.find(':');
      if (colon == std::string_view::npos) {
        spec.faults.push_back(parse_fault(value));
        continue;
      }
      const int index = parse_int(value.substr(0, colon), text, 0);
      if (index < specs[group_first].index || index > specs.back().index) {
        refuse(text, concat("'", item, "' names virtual:", index, ", which is not in the group before it"));
      }
      if (index == spec.index) spec.faults.push_back(parse_fault(value.substr(colon + 1)));
    } else if (key == "link" && spec.is_virtual) {
      spec.link_gb_per_s = parse_gb_per_s(value, "devices");
    } else if (key == "host" && spec.is_virtual) {
      spec.host_gb_per_s = parse_gb_per_s(value, "devices");
    } else if (key == "latency" && spec.is_virtual) {
      spec.latency_ms = parse_ms(value, "devices");
    } else if (key == "threads" && spec.is_virtual) {
      spec.threads = parse_int(value, text, 1);
    } else if (key == "debug" && value.empty() && spec.is_virtual) {
      spec.debug = true;
    } else {
      refuse(text, concat("unknown option '", item, "' for ", spec.name()));
    }
  }
}

}  // namespace

std::string DeviceSpec::name() const {
  return replica == 0 ? concat(type, ":", index) : concat(type, ":", index, ".", replica);
}

std::vector<DeviceSpec> parse_devices(std::string_view text) {
  std::vector<DeviceSpec> specs;
  size_t group_first = 0;
  int virtual_count = 0;
  std::vector<std::string_view> given;  // the options of the group
  std::string_view rest = text;
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view item = trimmed(rest.substr(0, comma));
    if (item.empty()) refuse(text, "an empty entry");
    if (item.find('=') != std::string_view::npos || item == "debug" || item == "fifo") {
      apply_option(item, text, specs, group_first);
      const std::string_view key = item.substr(0, item.find('='));
      if (std::ranges::find(given, key) != given.end()) {
        refuse(text, concat("the option ", key, " is given twice for ", specs[group_first].name()));
      }
      if (key != "fail") given.push_back(key);  // there may be several faults
    } else {
      given.clear();
      std::vector<DeviceSpec> group = parse_group(item, text, virtual_count);
      group_first = specs.size();
      if (group.front().is_virtual) virtual_count += static_cast<int>(group.size());
      specs.insert(specs.end(), group.begin(), group.end());
    }
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  for (const DeviceSpec& spec : specs) {
    if (spec.is_virtual != specs.front().is_virtual || spec.type != specs.front().type) {
      refuse(text, "all devices must be of one type");
    }
    if (spec.host_gb_per_s > 0 && spec.host_gb_per_s != specs.front().host_gb_per_s) {
      refuse(text, "host= is the bandwidth of all links together; give it to the first group of devices");
    }
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (specs[i].name() == specs[j].name()) refuse(text, concat(specs[i].name(), " is named twice"));
    }
  }
  return specs;
}

}  // namespace roundpipe::device
