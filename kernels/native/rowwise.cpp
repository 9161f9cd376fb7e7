#include "rowwise.h"

#include "cpu.h"
#include "kv_cache.h"
#include "rowwise_kernels.h"

namespace pe {
namespace {

RowwiseKernels kernels() {
#if defined(__x86_64__)
    switch (isa()) {
        case AMX:
        case AVX512: return rowwise_kernels_avx512();
        case AVX2: return rowwise_kernels_avx2();
        default: break;
    }
#endif
    return rowwise_kernels_portable();
}

// Elements that keep a thread busy for longer than it takes to wake it.
constexpr int64_t ENOUGH_ELEMENTS = 1 << 16;

// body(range) over [0, rows), on all threads if they have enough to do.
template <typename Body>
void run_rows(int64_t rows, int64_t row_size, const Body& body) {
    if (rows * row_size < 2 * ENOUGH_ELEMENTS)
        body(Range{0, rows});
    else
        parallel_for(rows, (ENOUGH_ELEMENTS / 4 + row_size - 1) / row_size, body);
}

}  // namespace

void rms_norm(const RmsNormArgs& args, Range rows) { kernels().rms_norm(args, rows.begin, rows.end); }

void silu_and_mul(const SiluAndMulArgs& args, Range rows) { kernels().silu_and_mul(args, rows.begin, rows.end); }

void write_kv(const KVWriteArgs& args, Range tokens) { kernels().write_kv(args, tokens.begin, tokens.end); }

}  // namespace pe

PE_EXPORT void pe_rms_norm(const pe::RmsNormArgs* args) {
    pe::run_rows(args->num_rows, args->size, [&](pe::Range rows) { pe::rms_norm(*args, rows); });
}

PE_EXPORT void pe_silu_and_mul(const pe::SiluAndMulArgs* args) {
    pe::run_rows(args->num_rows, args->size, [&](pe::Range rows) { pe::silu_and_mul(*args, rows); });
}

PE_EXPORT void pe_write_kv(const pe::KVWriteArgs* args) {
    const int64_t row_size = (args->num_heads + 2 * args->num_kv_heads) * args->head_dim;
    pe::run_rows(args->num_tokens, row_size, [&](pe::Range tokens) { pe::write_kv(*args, tokens); });
}
