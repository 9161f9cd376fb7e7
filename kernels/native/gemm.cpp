#include "gemm.h"

#include "cpu.h"
#include "gemm_amx.h"
#include "gemm_kernels.h"
#include "scratch.h"

namespace pe {
namespace {

// A block of rows, quantised, should stay in the second-level cache while a thread's panels pass by.
constexpr int64_t BLOCK_BYTES = 256 * 1024;
constexpr int64_t LEAST_BLOCK_ROWS = 96;
constexpr int64_t ROWS_TOGETHER = 32;  // what the widest loops take at once

// Whether tiles multiply, and whether such a matrix takes bf16 rows as they are.
bool by_tiles() { return isa() == AMX; }
bool takes_plain_rows(const PackedMatrix& w) { return w.format == WEIGHT_BF16; }

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
    const int64_t row_bytes = activation_type(w) == BF16 ? 2 * w.inputs : w.inputs;
    const int64_t rows = BLOCK_BYTES / row_bytes / ROWS_TOGETHER * ROWS_TOGETHER;
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

DType activation_type(const PackedMatrix& w) { return takes_plain_rows(w) || by_tiles() ? BF16 : F32; }

void quantize_rows(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to) {
    kernels().quantize_rows(x, type, stride, rows, to);
}

int64_t linear_units(const PackedMatrix& w, int64_t num_rows) {
    const int64_t height = block_rows(w);
    return (num_rows + height - 1) / height * w.panels();
}

Range rows_of_block(int64_t num_rows, int64_t block, int64_t blocks) {
    return share_of(num_rows, ROWS_TOGETHER, block, blocks);
}

void linear_part(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& epilogue, Range units) {
#if defined(__x86_64__)
    if (by_tiles()) return linear_part_amx(w, x, num_rows, epilogue, units);
#endif
    const KernelSet& set = kernels();
    const int64_t panels = w.panels(), blocks = linear_units(w, num_rows) / panels;
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const Range rows = rows_of_block(num_rows, unit / panels, blocks);
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
    const int64_t whole = (num_rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;  // tiles read all their rows
    return activation_type(w) == BF16 ? whole * w.inputs * 2 : QuantizedRows::bytes(num_rows, w.inputs, w.groups());
}

Activations activations_for(const PackedMatrix& w, const void* x, DType type, int64_t stride, int64_t num_rows,
                            void* memory) {
    if (activation_type(w) != BF16) return {nullptr, 0, QuantizedRows::in(memory, num_rows, w.inputs, w.groups())};
    if (type == BF16 && takes_plain_rows(w)) return {static_cast<const bf16*>(x), stride, {}};
    return {static_cast<const bf16*>(memory), w.inputs, {}};
}

bool needs_preparing(const PackedMatrix& w, DType type) { return !(type == BF16 && takes_plain_rows(w)); }

void prepare_rows(const PackedMatrix& w, const void* x, DType type, int64_t stride, Range rows, const Activations& to) {
    if (!needs_preparing(w, type)) return;
    if (activation_type(w) != BF16) {
        quantize_rows(x, type, stride, rows, to.quantized);
        return;
    }
#if defined(__x86_64__)
    if (!takes_plain_rows(w)) {
        tile_rows(x, type, stride, rows, w.inputs, const_cast<bf16*>(to.rows));
        return;
    }
#endif
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
