#include "gemm_kernels.h"
#include "gemm_scalar.h"

namespace pe {
namespace {

// Adds the product of one group of a row to y [32].
void add_group(const IntPanel& w, const int8_t* a, float a_scale, int32_t minus_sum, int64_t group, float* y) {
    int32_t sum[PANEL];
    for (int64_t i = 0; i < PANEL; ++i) sum[i] = 128 * minus_sum;
    for (int64_t k = group * w.group; k < (group + 1) * w.group; k += 4) {
        const uint8_t* b = w.values + k * PANEL;
        for (int64_t i = 0; i < PANEL; ++i)
            sum[i] += a[k] * b[4 * i] + a[k + 1] * b[4 * i + 1] + a[k + 2] * b[4 * i + 2] + a[k + 3] * b[4 * i + 3];
    }
    for (int64_t i = 0; i < PANEL; ++i) {
        const int64_t at = group * PANEL + i;
        float part = static_cast<float>(sum[i]);
        if (!w.channel_scales) part *= half_to_float(w.scales[at]);
        if (w.mins) part -= half_to_float(w.mins[at]) * static_cast<float>(minus_sum);
        y[i] += part * a_scale;
    }
}

void int_block(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs,
               const Epilogue& e, NextPanel) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float y[PANEL] = {};
        for (int64_t group = 0; group < x.groups; ++group) {
            const int8_t* a = x.values + row * x.inputs;
            const int64_t at = row * x.groups + group, rest = at + x.rest_of_groups();
            add_group(w, a, x.scales[at], x.minus_sums[at], group, y);
            if (x.scales[rest] != 0.0f) add_group(w, a + x.rest_of_values(), x.scales[rest], x.minus_sums[rest], group, y);
        }
        if (w.channel_scales) {
            for (int64_t i = 0; i < PANEL; ++i) y[i] *= half_to_float(w.scales[i]);
        }
        finish_row(e, row, output, outputs, y);
    }
}

void bf16_block(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, Range rows, int64_t output,
                int64_t outputs, const Epilogue& e, NextPanel) {
    const bf16* weights = reinterpret_cast<const bf16*>(panel);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float y[PANEL] = {};
        for (int64_t k = 0; k < inputs; k += 2) {
            const float first = to_float(x[row * x_stride + k]), second = to_float(x[row * x_stride + k + 1]);
            const bf16* b = weights + k * PANEL;
            for (int64_t i = 0; i < PANEL; ++i) y[i] += first * to_float(b[2 * i]) + second * to_float(b[2 * i + 1]);
        }
        finish_row(e, row, output, outputs, y);
    }
}

}  // namespace

const KernelSet kernels_portable{int_block, bf16_block, unpack4_scalar, 0, 0, narrow_scalar, quantize_rows_scalar};

}  // namespace pe
