// How a kernel runs. A team of lanes does the rows of one item, one after the other. For each row, every lane sweeps
// over its vectors of the row, the lanes' numbers are reduced in a tree, and they sweep again; a barrier lies between.
// The order of every sum follows from the width alone: the same bits on every card, and on the host.
//
// A kernel is a struct of arguments with
//   Int64 items, int width, int lanes
//   static constexpr int kNumbers: reduced for each row; 0: there is one sweep
//   int rows(item); int floats(): memory of a team beside its lanes' numbers; void begin(item, lane, floats);
//   State, a lane's own variables, made by begin_row(item, row)
//   void first(at, state), then numbers(state, to) and join(to, from), and void second(at, state, joined)
//   void end(item, lane, floats)
//   ROUNDPIPE_ADDRESSES(its fields that are addresses)
#ifdef ROUNDPIPE_ON_CARD
#define ROUNDPIPE_ADDRESSES(...)
#else
#define ROUNDPIPE_ADDRESSES(...)       \
  template <typename Visit>            \
  void addresses(const Visit& visit) { \
    visit(__VA_ARGS__);                \
  }
#endif

namespace roundpipe::kernels {

constexpr int kMostLanes = 256;

// Where a lane is: `count` elements from `first` on.
struct Place {
  Int64 item;
  int row;  // of the item
  int lane;
  int first;
  int count;
  float* floats;
};

template <typename Kernel>
ROUNDPIPE_CODE int vectors_of(const Kernel& kernel) {
  return (kernel.width + kVector * kernel.lanes - 1) / (kVector * kernel.lanes);
}

template <typename Kernel>
ROUNDPIPE_CODE Place place_of(const Kernel& kernel, Int64 item, int row, int lane, int vector, float* floats) {
  const int first = (vector * kernel.lanes + lane) * kVector;
  const Int64 rest = kernel.all - item * kernel.width;
  const int left = (kernel.all > 0 && rest < kernel.width ? static_cast<int>(rest) : kernel.width) - first;
  return {item, row, lane, first, left < 0 ? 0 : left < kVector ? left : kVector, floats};
}

#ifdef ROUNDPIPE_ON_CARD

// Of one block of kMostLanes threads, which are several teams if the rows are short.
template <typename Kernel>
ROUNDPIPE_CODE void run(const Kernel& kernel) {
  extern __shared__ float shared[];
  constexpr int kNumbers = Kernel::kNumbers;
  const int lanes = kernel.lanes, team = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const Int64 item = static_cast<Int64>(blockIdx.x) * (kMostLanes / lanes) + team;
  const bool works = item < kernel.items;
  float* const numbers = shared + team * lanes * kNumbers;
  float* const floats = shared + kMostLanes * kNumbers + team * kernel.floats();
  if (works) kernel.begin(item, lane, floats);
  const int rows = kernel.most_rows(), vectors = vectors_of(kernel);
  for (int row = 0; row < rows; ++row) {
    const bool has = works && row < kernel.rows(item);
    typename Kernel::State state = kernel.begin_row(has ? item : 0, has ? row : 0);
    for (int vector = 0; has && vector < vectors; ++vector) {
      const Place at = place_of(kernel, item, row, lane, vector, floats);
      if (at.count > 0) kernel.first(at, state);
    }
    if constexpr (kNumbers > 0) {
      kernel.numbers(state, numbers + lane * kNumbers);
      __syncthreads();
      for (int half = lanes / 2; half > 0; half /= 2) {
        if (lane < half) kernel.join(numbers + lane * kNumbers, numbers + (lane + half) * kNumbers);
        __syncthreads();
      }
      for (int vector = 0; has && vector < vectors; ++vector) {
        const Place at = place_of(kernel, item, row, lane, vector, floats);
        if (at.count > 0) kernel.second(at, state, numbers);
      }
      __syncthreads();
    }
  }
  if (works) kernel.end(item, lane, floats);
}

#else

// Calls visit(place) for every vector of a row, with a count that the compiler knows for whole ones.
template <typename Kernel, typename Visit>
ROUNDPIPE_CODE void sweep(const Kernel& kernel, Int64 item, int row, float* floats, const Visit& visit) {
  const int vectors = vectors_of(kernel);
  for (int vector = 0; vector < vectors; ++vector) {
    for (int lane = 0; lane < kernel.lanes; ++lane) {
      const Place at = place_of(kernel, item, row, lane, vector, floats);
      if (at.count == kVector) {
        visit(Place{item, row, lane, at.first, kVector, floats});
      } else if (at.count > 0) {
        visit(at);
      }
    }
  }
}

// One item. `shared` has room for lanes * kNumbers + floats() numbers.
template <typename Kernel>
ROUNDPIPE_CODE void run(const Kernel& kernel, Int64 item, float* shared) {
  constexpr int kNumbers = Kernel::kNumbers;
  const int lanes = kernel.lanes, rows = kernel.rows(item);
  float* const floats = shared + lanes * kNumbers;
  for (int lane = 0; lane < lanes; ++lane) kernel.begin(item, lane, floats);
  typename Kernel::State states[kMostLanes];
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < lanes; ++lane) states[lane] = kernel.begin_row(item, row);
    sweep(kernel, item, row, floats, [&](const Place& at) ROUNDPIPE_INLINE { kernel.first(at, states[at.lane]); });
    if constexpr (kNumbers > 0) {
      for (int lane = 0; lane < lanes; ++lane) kernel.numbers(states[lane], shared + lane * kNumbers);
      for (int half = lanes / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane)
          kernel.join(shared + lane * kNumbers, shared + (lane + half) * kNumbers);
      }
      sweep(kernel, item, row, floats,
            [&](const Place& at) ROUNDPIPE_INLINE { kernel.second(at, states[at.lane], shared); });
    }
  }
  for (int lane = 0; lane < lanes; ++lane) kernel.end(item, lane, floats);
}

#endif

// Of kernels that do one row for an item and keep nothing else.
struct PlainKernel {
  struct State {};
  static constexpr int kNumbers = 0;
  Int64 all = 0;  // elements, if an item is a piece of them; 0: it has rows
  ROUNDPIPE_CODE int rows(Int64) const { return 1; }
  ROUNDPIPE_CODE int most_rows() const { return 1; }
  ROUNDPIPE_CODE int floats() const { return 0; }
  ROUNDPIPE_CODE void begin(Int64, int, float*) const {}
  ROUNDPIPE_CODE State begin_row(Int64, int) const { return {}; }
  ROUNDPIPE_CODE void end(Int64, int, float*) const {}
};

}  // namespace roundpipe::kernels
