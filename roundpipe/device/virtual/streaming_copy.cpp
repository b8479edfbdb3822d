#include <roundpipe/device/virtual/streaming_copy.h>

#include <cstddef>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace roundpipe::device {

void streaming_copy(void* dst, const void* src, int64_t size_bytes) {
  auto size = static_cast<size_t>(size_bytes);
#ifdef __SSE2__
  if (size_bytes >= kStreamed_bytes) {
    constexpr size_t kLine = 64;
    constexpr size_t kAhead = 8 * kLine;
    auto* to = static_cast<std::byte*>(dst);
    const auto* from = static_cast<const std::byte*>(src);
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    size_t done = head;
    for (; done + kLine <= size; done += kLine) {
      const auto* line = reinterpret_cast<const __m128i*>(from + done);
      auto* target = reinterpret_cast<__m128i*>(to + done);
      _mm_prefetch(reinterpret_cast<const char*>(from + done + kAhead), _MM_HINT_NTA);
      const __m128i a = _mm_loadu_si128(line);
      const __m128i b = _mm_loadu_si128(line + 1);
      const __m128i c = _mm_loadu_si128(line + 2);
      const __m128i d = _mm_loadu_si128(line + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    // These stores are not ordered with later ones; a thread that is told the copy is done must see its data.
    _mm_sfence();
    dst = to + done;
    src = from + done;
    size -= done;
  }
#endif
  if (size > 0) std::memcpy(dst, src, size);
}

}  // namespace roundpipe::device
