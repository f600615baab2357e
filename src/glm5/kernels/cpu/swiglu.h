// silu(gate) * up of one row and its gradient.
#pragma once

#include "simd.h"

namespace {

GLM5_INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// out[f] = silu(gate[f]) * up[f]; gate_up holds the gates, then the ups.
GLM5_INLINE void swiglu(const float* gate_up, int64_t hidden, float* out) {
    int64_t f = 0;
    for (; f + LANES <= hidden; f += LANES) {
        vf gate = load(gate_up + f);
        store(out + f, gate / (1.0f + exp_lanes(-gate)) * load(gate_up + hidden + f));
    }
    for (; f < hidden; f++) out[f] = gate_up[f] * sigmoid(gate_up[f]) * gate_up[hidden + f];
}

// dgate_up from the gradient `dh` of the output times `weight`; returns dh . output and, unless null, writes the output.
GLM5_INLINE float swiglu_backward(const float* gate_up, const float* dh, float weight, int64_t hidden, float* h, float* dgate_up) {
    float product = 0.0f;
    for (int64_t f = 0; f < hidden; f += LANES) {
        int64_t count = at_most(LANES, hidden - f);
        vf gate = load_part(gate_up + f, count), up = load_part(gate_up + hidden + f, count), g = load_part(dh + f, count);
        vf s = 1.0f / (1.0f + exp_lanes(-gate)), silu = gate * s;
        float out[3][LANES];
        store(out[0], silu * up);
        store(out[1], g * weight * up * (s + silu * (1.0f - s)));
        store(out[2], g * weight * silu);
        if (h) memcpy(h + f, out[0], sizeof(float) * count);
        memcpy(dgate_up + f, out[1], sizeof(float) * count);
        memcpy(dgate_up + hidden + f, out[2], sizeof(float) * count);
        product += sum_lanes(g * silu * up);
    }
    return product;
}

}  // namespace
