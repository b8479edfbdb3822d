// Masters of 24 bits: (bf16 weight << 16) + (remainder << 8), in the bits of an fp32 number. Part of chunk.inl.
//
// Rounding adds a random byte to the eight bits that are cut off, so that the mean of what is kept is what was
// computed. That byte depends on the key and on the place of the element alone; four elements share a random word.

// A permutation of `place` for each key. The constants are those of lowbias32 (Wellons 2018), whose every input bit
// changes every output bit with a probability close to one half.
inline uint32_t random_word(RandomKey key, uint32_t place) {
  uint32_t word = place + key.first;
  word = (word ^ (word >> 16)) * 0x7FEB352DU;
  word = ((word ^ (word >> 15)) + key.second) * 0x846CA68BU;
  return word ^ (word >> 16);
}

inline void join_short(const uint16_t* weight, const int8_t* remainder, int64_t count, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) values[i] = joined(weight[i], static_cast<int16_t>(remainder[i] * 256));
}

// What is not finite stays that: arithmetic makes no NaN whose payload lies in the bits that are cut off.
inline uint32_t rounded_to_24_bits(uint32_t bits, uint32_t random_byte) {
  return ((bits & 0x7FFFFFFFU) < 0x7F800000U ? bits + random_byte : bits) & 0xFFFFFF00U;
}

// REQUIRES: count <= kChunk.
void split_short(const Memory& memory, int64_t begin, int64_t count, const float* __restrict values) {
  const int64_t first = memory.first_element + begin;
  const int64_t skipped = first % 4;
  alignas(64) uint32_t words[kChunk / 4 + 1];
  const RandomKey key = memory.rounding;
  const uint32_t place = static_cast<uint32_t>(first / 4);
  const uint32_t needed = static_cast<uint32_t>((skipped + count + 3) / 4);
  for (uint32_t i = 0; i < needed; ++i) words[i] = random_word(key, place + i);
  const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(words) + skipped;
  uint16_t* __restrict const weight = static_cast<uint16_t*>(memory.after) + begin;
  int8_t* __restrict const remainder = memory.short_remainder + begin;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = rounded_to_24_bits(bits_of(values[i]), bytes[i]);
    const uint16_t rounded = split_weight(bits);
    weight[i] = rounded;
    remainder[i] = static_cast<int8_t>(split_remainder(bits, rounded) >> 8);
  }
}
