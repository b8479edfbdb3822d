// Rotary positions (Su et al., "RoFormer", 2021), as transformers lays them out: the halves of a head turn together.
// The backward turns the other way.
namespace roundpipe::kernels {

// An item is the heads of one token.
template <typename T>
struct Rotary : PlainKernel {
  Int64 items;  // tokens of all rows
  int width;    // heads * half of a head
  int lanes;
  bool aligned;  // and half is a multiple of a vector
  int half;
  Int64 table_tokens;  // tokens of the tables, which repeat
  bool whole_tables;   // with both halves of a head; else with one, for both
  bool backward;
  const T* states;  // [tokens, heads, 2 * half]
  const T* cos;
  const T* sin;
  T* turned;
  ROUNDPIPE_ADDRESSES(states, cos, sin, turned)

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    const int entries = whole_tables ? 2 * half : half, second_half = whole_tables ? half : 0;
    const Int64 table = at.item % table_tokens * entries, token = at.item * width * 2;
    if (half % kVector == 0) {
      const int head = at.first / half, entry = at.first % half;
      turn(token + head * 2 * half + entry, table + entry, second_half, kVector);
      return;
    }
    for (int i = 0; i < at.count; ++i) {
      const int head = (at.first + i) / half, entry = (at.first + i) % half;
      turn(token + head * 2 * half + entry, table + entry, second_half, 1);
    }
  }
  ROUNDPIPE_CODE void turn(Int64 at, Int64 table, int second_half, int count) const {
    float a[kVector], b[kVector], cos_a[kVector], cos_b[kVector], sin_a[kVector], sin_b[kVector];
    read(states + at, count, aligned, a);
    read(states + at + half, count, aligned, b);
    read(cos + table, count, aligned, cos_a);
    read(sin + table, count, aligned, sin_a);
    read(cos + table + second_half, count, aligned, cos_b);
    read(sin + table + second_half, count, aligned, sin_b);
    for (int i = 0; i < kVector; ++i) {
      const float x = a[i], y = b[i];
      a[i] = backward ? x * cos_a[i] + y * sin_b[i] : x * cos_a[i] - y * sin_a[i];
      b[i] = backward ? y * cos_b[i] - x * sin_a[i] : y * cos_b[i] + x * sin_b[i];
    }
    write(turned + at, count, aligned, a);
    write(turned + at + half, count, aligned, b);
  }
};

}  // namespace roundpipe::kernels
