#include <roundpipe/runtime/worker/host_fingerprint.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <roundpipe/core/fingerprint.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/runtime/step/update_thread.h>

namespace roundpipe::runtime {

namespace {

// By all threads of the pool of updates.
uint64_t fingerprint_in_parts(const void* data, int64_t bytes) {
  constexpr int64_t kPart_bytes = 1 << 20;
  const int64_t parts = (bytes + kPart_bytes - 1) / kPart_bytes;
  std::vector<uint64_t> of_parts(static_cast<size_t>(parts));
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t at = part * kPart_bytes;
      of_parts[static_cast<size_t>(part)] =
          fingerprint(static_cast<const char*>(data) + at, static_cast<size_t>(std::min(kPart_bytes, bytes - at)));
    }
  };
  if (parts == 1) {
    work(0, 1);
  } else {
    optim::ThreadPool::current()->for_ranges(parts, 1, work);
  }
  uint64_t joined = static_cast<uint64_t>(bytes);
  for (const uint64_t part : of_parts) joined = join_fingerprints(joined, part);
  return joined;
}

// Tensor by tensor: what lies between them in a block means nothing.
uint64_t fingerprint_of(const memory::WeightVersion& version, const memory::BlockLayout& layout, uint64_t writes) {
  uint64_t joined = writes;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const memory::TensorLayout& tensor = layout.tensors[i];
    if (tensor.size_bytes == 0) continue;
    const char* const data = version.parts.empty()
                                 ? static_cast<const char*>(version.flat.const_data_ptr()) + tensor.offset_bytes
                                 : static_cast<const char*>(version.parts[i].const_data_ptr());
    joined = join_fingerprints(joined, fingerprint_in_parts(data, tensor.size_bytes));
  }
  return joined;
}

// How often the block's parameters were written to.
uint64_t writes_of(const memory::ParameterBlock& block) {
  uint64_t joined = 0;
  for (const memory::NamedTensor& parameter : block.parameters()) {
    const bool has_version = !parameter.tensor.is_inference();
    joined = join_fingerprints(joined, has_version ? static_cast<uint64_t>(parameter.tensor._version()) : 0);
  }
  return joined;
}

}  // namespace

HostFingerprintPtr host_fingerprint(Call& call, size_t block) {
  call.fingerprints.resize(call.model->blocks.size());
  HostFingerprintPtr& known = call.fingerprints[block];
  if (known) return known;
  const auto print = std::make_shared<HostFingerprint>();
  memory::ParameterBlock& weights = *call.model->blocks[block].block;
  const memory::WeightVersionPtr version = call.readings[block];
  weights.add_reader(version, print->known);
  // What is read, let go of before anybody knows the result: a model ends with the last call that uses it.
  struct Reading {
    std::shared_ptr<ModelState> model;  // has the layout
    memory::WeightVersionPtr version;
  };
  auto reading = std::make_shared<Reading>(Reading{call.model, version});
  const auto look = [print, reading, &layout = weights.layout(), writes = writes_of(weights)] {
    try {
      print->value = fingerprint_of(*reading->version, layout, writes);
    } catch (...) {
      print->value.reset();  // no memory for the parts, say: then the weights are uploaded
    }
    *reading = {};
    print->known->fire();
  };
  const auto first_layer = static_cast<size_t>(call.model->blocks[block].layers.front());
  version->published->then(
      [print, version, look, first_layer] {
        UpdateThread::Work work = UpdateThread::prepare(
            {std::numeric_limits<uint64_t>::max(), UpdateThread::Kind::kUpdate, first_layer}, look);
        if (version->published->error() || !UpdateThread::instance().submit(work)) print->known->fire();
      },
      [print](const std::exception_ptr&) { print->known->fire(); });
  return known = print;
}

}  // namespace roundpipe::runtime
