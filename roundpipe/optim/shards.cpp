#include <roundpipe/optim/shards.h>

#include <algorithm>
#include <numeric>

namespace roundpipe::optim {

Shards cut_into_shards(const std::vector<int64_t>& elements, int shards) {
  Shards cut(static_cast<size_t>(shards), std::vector<ElementRange>(elements.size()));
  const int64_t total = std::accumulate(elements.begin(), elements.end(), int64_t{0});
  int64_t before = 0;
  for (size_t p = 0; p < elements.size(); ++p) {
    for (int64_t first = 0; first < elements[p]; first += kShardGrain) {
      const int64_t last = std::min(first + kShardGrain, elements[p]);
      // The shard in whose equal share of all elements the middle of this part lies.
      const double middle = static_cast<double>(before + first) + static_cast<double>(last - first) / 2;
      const int64_t shard = static_cast<int64_t>(middle * shards / static_cast<double>(total));
      ElementRange& range = cut[static_cast<size_t>(std::min<int64_t>(shard, shards - 1))][p];
      if (range.count() == 0) range.first = first;
      range.last = last;
    }
    before += elements[p];
  }
  return cut;
}

}  // namespace roundpipe::optim
