#include "gemm.h"

#include "cpu.h"
#include "gemm_kernels.h"
#include "scratch.h"

namespace pe {
namespace {

// A block of rows, quantised, should stay in the second-level cache while a thread's panels pass by.
constexpr int64_t BLOCK_BYTES = 256 * 1024;
constexpr int64_t LEAST_BLOCK_ROWS = 96;

const KernelSet& kernels() {
#if defined(__x86_64__)
    switch (isa()) {
        case AMX:
        case AVX512: return kernels_avx512;
        case AVX2: return kernels_avx2;
        default: break;
    }
#endif
    return kernels_portable;
}

int64_t block_rows(const PackedMatrix& w) {
    const int64_t row_bytes = w.format == WEIGHT_BF16 ? 2 * w.inputs : w.inputs;
    const int64_t rows = BLOCK_BYTES / row_bytes / 12 * 12;
    return rows > LEAST_BLOCK_ROWS ? rows : LEAST_BLOCK_ROWS;
}

IntPanel int_panel(const PackedMatrix& w, int64_t index) {
    return {w.panel(index), w.panel_scales(index),   w.panel_mins(index),    w.inputs,
            w.group,        w.channel_scales != 0,   w.format == WEIGHT_INT4};
}

void int_part(const KernelSet& set, const PackedMatrix& w, const QuantizedRows& x, Range rows, int64_t index,
              const Epilogue& e, NextPanel next) {
    IntPanel panel = int_panel(w, index);
    if (panel.packed4 && (w.group != set.packed4_group || rows.size() >= set.unpack4_from_rows)) {
        uint8_t* bytes = thread_scratch(PANEL * w.inputs);
        set.unpack4(panel.values, w.inputs, w.mins ? 128 : 120, bytes);
        panel.values = bytes;
        panel.packed4 = false;
    }
    set.int_block(panel, x, rows, index * PANEL, w.outputs, e, next);
}

}  // namespace

void quantize_rows(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to) {
    kernels().quantize_rows(x, type, stride, rows, to);
}

int64_t linear_units(const PackedMatrix& w, int64_t num_rows) {
    const int64_t height = block_rows(w);
    return (num_rows + height - 1) / height * w.panels();
}

void linear_part(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& epilogue, Range units) {
    const KernelSet& set = kernels();
    const int64_t panels = w.panels(), blocks = linear_units(w, num_rows) / panels;
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const Range rows = share_of(num_rows, 1, unit / panels, blocks);
        const int64_t index = unit % panels;
        const bool more = unit + 1 < units.end;
        const NextPanel next{more ? w.panel((unit + 1) % panels) : nullptr, w.panel_bytes()};
        if (w.format == WEIGHT_BF16) {
            set.bf16_block(w.panel(index), w.inputs, x.rows, x.stride, rows, index * PANEL, w.outputs, epilogue, next);
        } else {
            int_part(set, w, x.quantized, rows, index, epilogue, next);
        }
    }
}

int64_t activation_bytes(const PackedMatrix& w, int64_t num_rows) {
    return w.format == WEIGHT_BF16 ? num_rows * w.inputs * 2 : QuantizedRows::bytes(num_rows, w.inputs, w.groups());
}

Activations activations_for(const PackedMatrix& w, const void* x, DType type, int64_t stride, int64_t num_rows,
                            void* memory) {
    if (w.format != WEIGHT_BF16) return {nullptr, 0, QuantizedRows::in(memory, num_rows, w.inputs, w.groups())};
    if (type == BF16) return {static_cast<const bf16*>(x), stride, {}};
    return {static_cast<const bf16*>(memory), w.inputs, {}};
}

void prepare_rows(const PackedMatrix& w, const void* x, DType type, int64_t stride, Range rows, const Activations& to) {
    if (w.format != WEIGHT_BF16) {
        quantize_rows(x, type, stride, rows, to.quantized);
        return;
    }
    if (type == BF16) return;
    const KernelSet& set = kernels();
    for (int64_t row = rows.begin; row < rows.end; ++row)
        set.narrow(static_cast<const float*>(x) + row * stride, w.inputs, const_cast<bf16*>(to.rows) + row * to.stride);
}

Activations linear(Phases& phases, const PackedMatrix& w, const void* x, DType type, int64_t stride, int64_t num_rows,
                   void* memory, const Epilogue& epilogue) {
    const Activations ready = activations_for(w, x, type, stride, num_rows, memory);
    phases.each(num_rows, [&](Range rows) { prepare_rows(w, x, type, stride, rows, ready); });
    phases.each(linear_units(w, num_rows),
                [&](Range units) { linear_part(w, ready, num_rows, epilogue, units); });
    return ready;
}

}  // namespace pe

// y = x W^T through the epilogue. x: [num_rows, K] of `type` (F32 or BF16), rows `stride` elements apart.
PE_EXPORT void pe_linear(const pe::PackedMatrix* w, const void* x, int32_t type, int64_t stride, int64_t num_rows,
                         const pe::Epilogue* epilogue) {
    using namespace pe;
    void* memory = thread_scratch(activation_bytes(*w, num_rows), 1);
    run_phases([&](Phases& phases) {
        linear(phases, *w, x, static_cast<DType>(type), stride, num_rows, memory, *epilogue);
    });
}
