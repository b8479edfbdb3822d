#include <roundpipe/cluster/differences.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include <roundpipe/cluster/message.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>

namespace roundpipe::cluster {

namespace {

constexpr size_t kMost = 4;  // differences that a message names; the others are counted

// Parts, with `last` before the last one and commas before the others.
std::string joined(const std::vector<std::string>& parts, const char* separator, const char* last) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i)
    text += concat(i == 0 ? "" : (i + 1 == parts.size() ? last : separator), parts[i]);
  return text;
}

}  // namespace

std::string ranks_in_words(const std::vector<int>& ranks) {
  std::vector<std::string> numbers;
  for (const int rank : ranks) numbers.push_back(std::to_string(rank));
  return concat(ranks.size() == 1 ? "rank " : "ranks ", joined(numbers, ", ", " and "));
}

std::string held(const std::vector<std::string>& values) {
  std::vector<std::pair<std::string, std::vector<int>>> ranks_with;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    auto found = std::ranges::find(ranks_with, values[rank], [](const auto& each) { return each.first; });
    if (found == ranks_with.end()) found = ranks_with.insert(found, {values[rank], {}});
    found->second.push_back(static_cast<int>(rank));
  }
  std::vector<std::string> parts;
  for (const auto& [value, ranks] : ranks_with)
    parts.push_back(concat(ranks_in_words(ranks), ranks.size() == 1 ? " has " : " have ", value));
  return joined(parts, ", ", ", ");
}

std::string differences(const std::vector<Told>& told) {
  std::vector<std::unordered_map<std::string, std::string>> by_name(told.size());
  std::vector<std::string> names;
  std::unordered_set<std::string> known;
  for (size_t rank = 0; rank < told.size(); ++rank) {
    for (const auto& [name, value] : told[rank]) {
      by_name[rank].insert_or_assign(name, value);
      if (known.insert(name).second) names.push_back(name);
    }
  }
  std::vector<std::string> found;
  for (const std::string& name : names) {
    std::vector<std::string> values;
    for (const auto& each : by_name) {
      const auto value = each.find(name);
      values.push_back(value == each.end() ? "none" : value->second);
    }
    if (std::ranges::any_of(values, [&](const std::string& value) { return value != values.front(); }))
      found.push_back(concat(name, ": ", held(values)));
  }
  const size_t count = found.size();
  found.resize(std::min(count, kMost));
  return joined(found, "; ", "; ") + (count > kMost ? concat("; and ", count - kMost, " more") : "");
}

uint64_t digest_of(const Told& told) {
  std::map<std::string, std::string> sorted;
  for (const auto& [name, value] : told) sorted.insert_or_assign(name, value);
  Message message;
  for (const auto& [name, value] : sorted) message.add(name).add(value);
  return fingerprint(message.bytes().data(), message.bytes().size());
}

}  // namespace roundpipe::cluster
