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

// Bounded, where it is the form's; NaN stays.
ROUNDPIPE_CODE float gate_of(const GateForm& form, float gate) {
  return form.clamped && gate > form.limit ? form.limit : gate;
}
ROUNDPIPE_CODE float up_of(const GateForm& form, float up) {
  if (!form.clamped) return up;
  return up > form.limit ? form.limit : up < -form.limit ? -form.limit : up;
}

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
    for (int i = 0; i < kVector; ++i) {
      if (form.clamped) {
        const float x = gate_of(form, g[i]), y = up_of(form, u[i]);
        g[i] = (y + 1.0f) * (x * sigmoid(form.alpha * x));
      } else {
        g[i] = g[i] * sigmoid(g[i]) * u[i];
      }
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
    for (int i = 0; i < kVector; ++i) {
      const float alpha = form.clamped ? form.alpha : 1.0f;
      // A bound that is passed, or is not known to hold, stops the gradient, as in torch.
      const bool gate_passes = !form.clamped || g[i] <= form.limit;
      const bool up_passes = !form.clamped || (u[i] <= form.limit && u[i] >= -form.limit);
      const float x = gate_of(form, g[i]), y = up_of(form, u[i]);
      const float share = sigmoid(alpha * x), offset = form.clamped ? 1.0f : 0.0f;
      const float slope = share * (1.0f + alpha * x * (1.0f - share));
      g[i] = gate_passes ? d[i] * (y + offset) * slope : 0.0f;
      u[i] = up_passes ? d[i] * (x * share) : 0.0f;
    }
    write_every(gate_gradient + from, step, at.count, aligned, g);
    write_every(up_gradient + from, step, at.count, aligned, u);
  }
};

}  // namespace roundpipe::kernels
