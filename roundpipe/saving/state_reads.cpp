#include <roundpipe/saving/state_reads.h>

#include <algorithm>
#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

namespace {

using Part = StoredCheckpoint::Part;

// Whether elements with these strides lie side by side, in any order of the dimensions.
bool are_dense(at::IntArrayRef shape, const std::vector<int64_t>& strides) {
  if (shape.size() != strides.size()) return false;
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != 1) dimensions.emplace_back(strides[i], shape[i]);
  }
  std::ranges::sort(dimensions);
  int64_t elements = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != elements) return false;
    elements *= size;
  }
  return true;
}

}  // namespace

at::Tensor own_elements(const at::Tensor& tensor, const std::optional<ElementsOf>& range) {
  if (!range) return tensor;
  return tensor.as_strided({range->second - range->first}, {1}, tensor.storage_offset() + range->first);
}

void StateReads::take(const std::string& name, const std::string& kind, const at::Tensor& target,
                      const at::Tensor& like, const std::optional<ElementsOf>& range) {
  const std::string key = concat(name, "/", kind);
  stored_.parts_of(key);
  if (!range && stored_.nodes() == 1 && in_parts_) {
    const saving::StoredTensor& stored = stored_.parts_of(key).front().tensor;
    if (target.is_contiguous()) {
      ranges_[stored.file].push_back({key, 0, target.view(-1)});
      return;
    }
    const at::Tensor ordered = at::empty(target.sizes(), target.options());
    ranges_[stored.file].push_back({key, 0, ordered.view(-1)});
    afterwards_.emplace_back([target, ordered] { target.copy_(ordered); });
    return;
  }
  if (!range && stored_.nodes() == 1) {
    whole_tensors_.emplace_back(key, target);
    return;
  }
  const Unit unit = unit_of(key);
  const ElementsOf wanted = range.value_or(ElementsOf{0, like.numel()});
  const at::Tensor flat = own_elements(target, ElementsOf{0, target.numel()});
  if (has_memory_order(name, like, unit)) return add(key, flat, wanted, like.numel(), unit);
  if (unit.block > 1) {
    const std::optional<std::vector<int64_t>> strides = stored_.strides(name);
    throw std::invalid_argument(concat("[load_checkpoint] '", name, "' had the strides ",
                                       strides ? concat(at::IntArrayRef(*strides)) : "None", " when ", stored_.folder(),
                                       " was saved, expected ", like.strides(),
                                       ", since its moments of 8 bits are in blocks of that order; make the model as "
                                       "it was"));
  }
  const at::Tensor read = whole(name, kind, like.sizes());
  afterwards_.emplace_back([read, like, flat, wanted] {
    const at::Tensor ordered = at::empty_strided(like.sizes(), like.strides(), read.options()).copy_(read);
    flat.copy_(own_elements(ordered, wanted));
  });
}

at::Tensor StateReads::whole(const std::string& name, const std::string& kind, at::IntArrayRef shape) {
  const std::string key = concat(name, "/", kind);
  const saving::StoredTensor& first = stored_.parts_of(key).front().tensor;
  if (stored_.nodes() == 1) {
    const at::Tensor made = at::empty(first.shape, first.dtype);
    if (in_parts_) {
      ranges_[first.file].push_back({key, 0, made.view(-1)});
    } else {
      whole_tensors_.emplace_back(key, made);
    }
    return made;
  }
  const Unit unit = unit_of(key);
  const int64_t elements = c10::multiply_integers(shape);
  at::Tensor made;
  if (unit.block > 1) {
    made = at::empty({unit.end(elements)}, first.dtype);
  } else if (const std::optional<std::vector<int64_t>> strides = stored_.strides(name)) {
    if (!are_dense(shape, *strides)) {
      throw files::damage_of(files::join(stored_.folder(), kStateFile),
                             concat("the strides of '", name, "' are ", at::IntArrayRef(*strides), " for the shape ",
                                    shape, "; it is damaged, use another checkpoint"));
    }
    made = at::empty_strided(shape, *strides, first.dtype);
  } else {
    made = at::empty(shape, first.dtype);
  }
  add(key, own_elements(made, ElementsOf{0, made.numel()}), {0, elements}, elements, unit);
  return made;
}

// Whether files count the elements as the memory of `like` does.
bool StateReads::has_memory_order(const std::string& name, const at::Tensor& like, const Unit& unit) const {
  if (stored_.nodes() == 1) return unit.block > 1 || like.is_contiguous();
  const std::optional<std::vector<int64_t>> strides = stored_.strides(name);
  return strides ? like.strides() == at::IntArrayRef(*strides) : like.is_contiguous();
}

StateReads::Unit StateReads::unit_of(const std::string& key) const {
  constexpr std::string_view kScale = "_scale";
  const std::string codes = key.ends_with(kScale) ? key.substr(0, key.size() - kScale.size()) : key;
  const auto of_codes = stored_.parts().find(codes);
  const auto of_scales = stored_.parts().find(concat(codes, kScale));
  if (of_codes == stored_.parts().end() || of_scales == stored_.parts().end()) return {};
  const auto scale = std::ranges::find_if(of_scales->second, [](const Part& part) { return part.count() > 0; });
  if (scale == of_scales->second.end()) return {};
  const auto code = std::ranges::find_if(
      of_codes->second, [&](const Part& part) { return part.first == scale->first && part.count() > 0; });
  if (code == of_codes->second.end() || code->count() < scale->count()) {
    throw files::damage_of(stored_.folder(),
                           concat("'", codes, "' has other parts than its scales; use another checkpoint"));
  }
  const int64_t block = code->count() / scale->count();
  return {key == codes ? 1 : block, block};
}

void StateReads::add(const std::string& key, const at::Tensor& flat, ElementsOf range, int64_t elements,
                     const Unit& unit) {
  const auto [first, last] = range;
  int64_t found = 0;
  for (const Part& part : stored_.parts_of(key)) {
    const int64_t begin = std::max(first, part.first);
    const int64_t end = std::min(last, part.last.value_or(elements));
    if (begin >= end) continue;
    const int64_t offset = unit.index(begin) - unit.index(part.first), place = unit.index(begin) - unit.index(first);
    // Slices end with the tensor, as the last block of a parameter does.
    ranges_[part.tensor.file].push_back({key, offset, flat.slice(0, place, place + unit.end(end) - unit.index(begin))});
    found += end - begin;
  }
  if (found == last - first) return;
  throw files::DamagedCheckpoint(concat("[load_checkpoint] ", stored_.folder(), " has ", found, " of the elements ",
                                        first, " to ", last, " of '", key,
                                        "', expected all; it is damaged, use another checkpoint"));
}

void StateReads::read() {
  std::map<std::pair<std::string, std::string>, const Part*> parts;  // by file and name
  for (const auto& [key, of_key] : stored_.parts()) {
    for (const Part& part : of_key) parts[{part.tensor.file, key}] = &part;
  }
  StoredCheckpoint::FileDestinations streamed;
  for (const auto& [file, ranges] : ranges_) {
    const bool is_whole = !in_parts_ && std::ranges::all_of(ranges, [&, &file = file](const saving::Range& range) {
      return range.first == 0 && range.tensor.numel() == parts.at({file, range.name})->count();
    });
    if (!is_whole) continue;
    for (const saving::Range& range : ranges)
      streamed[file].emplace_back(range.name, range.tensor.view(parts.at({file, range.name})->tensor.shape));
  }
  for (const auto& [file, tensors] : streamed) ranges_.erase(file);
  stored_.read_files(streamed);
  stored_.read_ranges(ranges_);
  const at::NoGradGuard no_grad;
  for (const std::function<void()>& place : afterwards_) place();
}

}  // namespace roundpipe
