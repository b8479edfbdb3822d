#include <roundpipe/cluster/shard_bytes.h>

#include <algorithm>

namespace roundpipe::cluster {

int64_t ShardBytes::Run::largest_bytes() const {
  int64_t largest = 0;
  for (size_t shard = 0; shard + 1 < bounds.size(); ++shard) largest = std::max(largest, shard_bytes(shard));
  return largest;
}

ShardBytes locate_shards(const memory::BlockLayout& layout, const optim::Shards& shards,
                         const std::vector<char>& trained) {
  ShardBytes located;
  const size_t parameters = layout.tensors.size();
  for (size_t first = 0; first < parameters;) {
    if (!trained[first]) {
      ++first;
      continue;
    }
    size_t last = first + 1;
    while (last < parameters && trained[last]) ++last;
    ShardBytes::Run run{first, last, std::vector<int64_t>(shards.size() + 1)};
    run.bounds.back() = layout.tensors[last - 1].offset_bytes + layout.tensors[last - 1].size_bytes;
    for (size_t shard = shards.size(); shard-- > 0;) {
      run.bounds[shard] = run.bounds[shard + 1];  // if it has nothing here
      for (size_t p = first; p < last; ++p) {
        if (shards[shard][p].count() == 0) continue;
        const memory::TensorLayout& tensor = layout.tensors[p];
        run.bounds[shard] =
            tensor.offset_bytes + shards[shard][p].first * static_cast<int64_t>(c10::elementSize(tensor.dtype));
        break;
      }
    }
    run.bounds.front() = layout.tensors[first].offset_bytes;
    located.runs.push_back(std::move(run));
    first = last;
  }
  return located;
}

}  // namespace roundpipe::cluster
