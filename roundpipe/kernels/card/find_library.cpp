#include <roundpipe/kernels/card/find_library.h>

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>

#include <roundpipe/core/error.h>

namespace roundpipe::kernels::card {
namespace {

namespace fs = std::filesystem;

constexpr int kNewest = 16;  // of the majors that are looked for

// Where torch's own libraries lie: the folder lib of its package.
fs::path torch_folder() {
  Dl_info found{};
  if (dladdr(reinterpret_cast<void*>(&c10::GetAllocator), &found) == 0 || found.dli_fname == nullptr) return {};
  std::error_code error;
  return fs::canonical(found.dli_fname, error).parent_path();
}

std::vector<fs::path> folders_beside_torch() {
  const fs::path torch = torch_folder(), packages = torch.parent_path().parent_path();
  std::vector<fs::path> folders{torch};
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(packages / "nvidia", error)) {
    folders.push_back(entry.path() / "lib");
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(packages, error)) {
    if (entry.path().filename().string().starts_with("_rocm_sdk_")) folders.push_back(entry.path() / "lib");
  }
  return folders;
}

// Paths, newest first.
std::vector<std::string> beside_torch(const std::string& name, int newest_major) {
  std::vector<std::pair<int, std::string>> found;
  for (const fs::path& folder : folders_beside_torch()) {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
      const int major = major_of(entry.path().filename().string(), name);
      if (major >= 0 && major <= newest_major) found.emplace_back(-major, entry.path().string());
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& [major, path] : found) paths.push_back(std::move(path));
  return paths;
}

}  // namespace

int major_of(const std::string& file, const std::string& name) {
  if (file == name) return 0;
  if (!file.starts_with(name + ".")) return -1;
  int major = -1;
  std::from_chars(file.data() + name.size() + 1, file.data() + file.size(), major);
  return major;
}

void* find_library(const std::string& name, int newest_major) {
  std::vector<std::string> by_name;
  for (int major = std::min(newest_major, kNewest); major > 0; --major) {
    by_name.push_back(concat(name, ".", major));
  }
  by_name.push_back(name);
  for (const std::string& each : by_name) {
    if (void* const handle = dlopen(each.c_str(), RTLD_LAZY | RTLD_NOLOAD)) return handle;
  }
  for (const std::string& each : beside_torch(name, newest_major)) {
    if (void* const handle = dlopen(each.c_str(), RTLD_LAZY | RTLD_LOCAL)) return handle;
  }
  for (const std::string& each : by_name) {
    if (void* const handle = dlopen(each.c_str(), RTLD_LAZY | RTLD_LOCAL)) return handle;
  }
  return nullptr;
}

void* find_function(void* library, const std::string& name) {
  if (void* const function = dlsym(library, name.c_str())) return function;
  throw Error(concat("[kernels] a library of the card's vendor lacks ", name, "; install the one that torch needs"));
}

}  // namespace roundpipe::kernels::card
