#include <roundpipe/tokens/packing.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include <roundpipe/core/error.h>

namespace roundpipe::tokens {

std::vector<std::vector<int64_t>> assign_rows(const std::vector<int64_t>& lengths, int64_t capacity) {
  const auto length_of = [&](int64_t sample) { return lengths[static_cast<size_t>(sample)]; };
  const auto wrong = std::ranges::find_if(lengths, [&](int64_t length) { return length < 0 || length > capacity; });
  if (wrong != lengths.end()) {
    throw std::invalid_argument(
        concat("[assign_rows] length ", wrong - lengths.begin(), " is ", *wrong, ", expected 0 to ", capacity));
  }
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return length_of(a) > length_of(b); });
  std::vector<std::vector<int64_t>> rows;
  std::set<std::pair<int64_t, size_t>> free;  // room and row
  for (const int64_t sample : order) {
    auto found = free.lower_bound({length_of(sample), 0});
    if (found == free.end()) {
      found = free.emplace(capacity, rows.size()).first;
      rows.emplace_back();
    }
    const auto [room, row] = *found;
    free.erase(found);
    rows[row].push_back(sample);
    free.emplace(room - length_of(sample), row);
  }
  for (std::vector<int64_t>& row : rows) std::ranges::sort(row);
  std::ranges::sort(rows, {}, [](const std::vector<int64_t>& row) { return row.front(); });
  return rows;
}

}  // namespace roundpipe::tokens
