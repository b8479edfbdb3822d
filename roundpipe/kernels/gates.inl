// The gates of MLPs: silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020), and GPT-OSS's, which is
// (up + 1) * gate * sigmoid(alpha * gate) with both bounded by `limit`, the gate from above only.
namespace roundpipe::kernels {

struct GateForm {
  bool clamped;
  float alpha;
  float limit;
};

// Elements in any shape; an item is a piece of them. `step`: 2 where gate and up alternate.
template <typename T>
struct Gate : PlainKernel {
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  int step;
  GateForm form;
  const T* gate;
  const T* up;
  T* result;

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    float g[kVector], u[kVector];
    const Int64 from = at.item * width + at.first;
    const int count = at.count;
    if (step == 1) {
      read(gate + from, count, aligned, g);
      read(up + from, count, aligned, u);
    } else {
      for (int i = 0; i < kVector; ++i) g[i] = i < count ? to_float(gate[(from + i) * step]) : 0.0f;
      for (int i = 0; i < kVector; ++i) u[i] = i < count ? to_float(up[(from + i) * step]) : 0.0f;
    }
    for (int i = 0; i < kVector; ++i) {
      if (form.clamped) {
        const float x = g[i] > form.limit ? form.limit : g[i];
        const float y = u[i] > form.limit ? form.limit : u[i] < -form.limit ? -form.limit : u[i];
        g[i] = (y + 1.0f) * (x * sigmoid(form.alpha * x));
      } else {
        g[i] = g[i] * sigmoid(g[i]) * u[i];
      }
    }
    write(result + from, count, aligned, g);
  }
};

template <typename T>
struct GateBackward : PlainKernel {
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  int step;
  GateForm form;
  const T* gradient;
  const T* gate;
  const T* up;
  T* gate_gradient;
  T* up_gradient;

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    float d[kVector], g[kVector], u[kVector];
    const Int64 from = at.item * width + at.first;
    const int count = at.count;
    read(gradient + from, count, aligned, d);
    if (step == 1) {
      read(gate + from, count, aligned, g);
      read(up + from, count, aligned, u);
    } else {
      for (int i = 0; i < kVector; ++i) g[i] = i < count ? to_float(gate[(from + i) * step]) : 0.0f;
      for (int i = 0; i < kVector; ++i) u[i] = i < count ? to_float(up[(from + i) * step]) : 0.0f;
    }
    for (int i = 0; i < kVector; ++i) {
      const float alpha = form.clamped ? form.alpha : 1.0f;
      // A bound that is passed, or is not known to hold, stops the gradient, as in torch.
      const bool gate_passes = !form.clamped || g[i] <= form.limit;
      const bool up_passes = !form.clamped || (u[i] <= form.limit && u[i] >= -form.limit);
      const float x = form.clamped && g[i] > form.limit ? form.limit : g[i];
      float y = u[i];
      if (form.clamped) y = y > form.limit ? form.limit : y < -form.limit ? -form.limit : y;
      const float share = sigmoid(alpha * x), offset = form.clamped ? 1.0f : 0.0f;
      const float slope = share * (1.0f + alpha * x * (1.0f - share));
      g[i] = gate_passes ? d[i] * (y + offset) * slope : 0.0f;
      u[i] = up_passes ? d[i] * (x * share) : 0.0f;
    }
    if (step == 1) {
      write(gate_gradient + from, count, aligned, g);
      write(up_gradient + from, count, aligned, u);
    } else {
      for (int i = 0; i < kVector; ++i) {
        if (i < count) round_to(gate_gradient[(from + i) * step], g[i]);
        if (i < count) round_to(up_gradient[(from + i) * step], u[i]);
      }
    }
  }
};

}  // namespace roundpipe::kernels
