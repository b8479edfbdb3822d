// The gates of MLPs: silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020), and GPT-OSS's, which is
// (up + 1) * gate * sigmoid(alpha * gate) with both bounded by `limit`, the gate from above only.
namespace roundpipe::kernels {

struct GateForm {
  bool clamped;
  float alpha;
  float limit;
};

// Elements of gate and up: an item's begin `pitch` elements after those of the one before, and alternate if `step` is
// 2.
template <typename T>
ROUNDPIPE_CODE void read_every(const T* from, int step, int count, bool aligned, float* to) {
  if (step == 1) {
    read(from, count, aligned, to);
  } else {
    for (int i = 0; i < kVector; ++i) to[i] = i < count ? to_float(from[i * step]) : 0.0f;
  }
}

template <typename T>
ROUNDPIPE_CODE void write_every(T* to, int step, int count, bool aligned, const float* from) {
  if (step == 1) {
    write(to, count, aligned, from);
  } else {
    for (int i = 0; i < kVector; ++i) {
      if (i < count) round_to(to[i * step], from[i]);
    }
  }
}

// What a gate computes for one element; NaN stays.
struct SiluGate {
  ROUNDPIPE_CODE static float value(const GateForm&, float gate, float up) { return gate * sigmoid(gate) * up; }
  ROUNDPIPE_CODE static void gradients(const GateForm&, float given, float& gate, float& up) {
    const float share = sigmoid(gate), slope = share * (1.0f + gate * (1.0f - share));
    const float of_gate = given * up * slope;
    up = given * (gate * share);
    gate = of_gate;
  }
};

struct ClampedGate {
  ROUNDPIPE_CODE static float bounded(const GateForm& form, float gate) {
    return gate > form.limit ? form.limit : gate;
  }
  ROUNDPIPE_CODE static float bounded_both(const GateForm& form, float up) {
    return up > form.limit ? form.limit : up < -form.limit ? -form.limit : up;
  }
  ROUNDPIPE_CODE static float value(const GateForm& form, float gate, float up) {
    const float x = bounded(form, gate), y = bounded_both(form, up);
    return (y + 1.0f) * (x * sigmoid(form.alpha * x));
  }
  ROUNDPIPE_CODE static void gradients(const GateForm& form, float given, float& gate, float& up) {
    // A bound that is passed, or is not known to hold, stops the gradient, as in torch.
    const bool gate_passes = gate <= form.limit, up_passes = up <= form.limit && up >= -form.limit;
    const float x = bounded(form, gate), y = bounded_both(form, up);
    const float share = sigmoid(form.alpha * x), slope = share * (1.0f + form.alpha * x * (1.0f - share));
    gate = gate_passes ? given * (y + 1.0f) * slope : 0.0f;
    up = up_passes ? given * (x * share) : 0.0f;
  }
};

// An item is a row, or a piece of all elements.
template <typename T>
struct Gate : PlainKernel {
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  Int64 pitch;
  int step;
  GateForm form;
  const T* gate;
  const T* up;
  T* result;
  ROUNDPIPE_ADDRESSES(gate, up, result)

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    float g[kVector], u[kVector];
    const Int64 from = at.item * pitch + at.first * step;
    read_every(gate + from, step, at.count, aligned, g);
    read_every(up + from, step, at.count, aligned, u);
    if (form.clamped) {
      for (int i = 0; i < kVector; ++i) g[i] = ClampedGate::value(form, g[i], u[i]);
    } else {
      for (int i = 0; i < kVector; ++i) g[i] = SiluGate::value(form, g[i], u[i]);
    }
    write(result + at.item * width + at.first, at.count, aligned, g);
  }
};

template <typename T>
struct GateBackward : PlainKernel {
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  Int64 pitch;
  int step;
  GateForm form;
  const T* gradient;
  const T* gate;
  const T* up;
  T* gate_gradient;
  T* up_gradient;
  ROUNDPIPE_ADDRESSES(gradient, gate, up, gate_gradient, up_gradient)

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    float d[kVector], g[kVector], u[kVector];
    const Int64 from = at.item * pitch + at.first * step;
    read(gradient + at.item * width + at.first, at.count, aligned, d);
    read_every(gate + from, step, at.count, aligned, g);
    read_every(up + from, step, at.count, aligned, u);
    if (form.clamped) {
      for (int i = 0; i < kVector; ++i) ClampedGate::gradients(form, d[i], g[i], u[i]);
    } else {
      for (int i = 0; i < kVector; ++i) SiluGate::gradients(form, d[i], g[i], u[i]);
    }
    write_every(gate_gradient + from, step, at.count, aligned, g);
    write_every(up_gradient + from, step, at.count, aligned, u);
  }
};

}  // namespace roundpipe::kernels
