// The loops of llama_rows.h.
#pragma once

#include "llama_rows.h"
#include "vector.h"

namespace pe {
namespace {

PE_ALWAYS_INLINE float inverse_rms(const float* x, int64_t n, float eps) {
    f32v sums[2] = {};
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        const f32v a = load_upto(x + i, n - i);
        const f32v b = n - i > LANES ? load_upto(x + i + LANES, n - i - LANES) : f32v{};
        sums[0] = fma(a, a, sums[0]);
        sums[1] = fma(b, b, sums[1]);
    }
    return 1.0f / __builtin_sqrtf(reduce_add(sums[0] + sums[1]) / static_cast<float>(n) + eps);
}

template <typename Out>
PE_ALWAYS_INLINE void scale_row(const float* x, const float* weight, int64_t n, float factor, Out* out) {
    for (int64_t i = 0; i < n; i += LANES)
        store_upto(out + i, load_upto(x + i, n - i) * factor * load_upto(weight + i, n - i), n - i);
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, void* out, DType out_type) {
    const float factor = inverse_rms(x, n, eps);
    if (out_type == BF16)
        scale_row(x, weight, n, factor, static_cast<bf16*>(out));
    else
        scale_row(x, weight, n, factor, static_cast<float*>(out));
}

void narrow(const float* from, int64_t n, bf16* to) {
    for (int64_t i = 0; i < n; i += LANES) store_upto(to + i, load_upto(from + i, n - i), n - i);
}

// Dimension i turns with i + D / 2 (Su et al. 2021, arXiv:2104.09864).
template <typename Out>
PE_ALWAYS_INLINE void turn(const float* head, const HeadsOfToken& heads, Out* out) {
    const int64_t half = heads.head_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const f32v first = load_upto(head + i, half - i), second = load_upto(head + half + i, half - i);
        const f32v cos = load_upto(heads.cos + i, half - i), sin = load_upto(heads.sin + i, half - i);
        store_upto(out + i, first * cos - second * sin, half - i);
        store_upto(out + half + i, second * cos + first * sin, half - i);
    }
}

template <typename Cache>
PE_ALWAYS_INLINE void turn_and_keep_as(const HeadsOfToken& heads) {
    const int64_t dim = heads.head_dim;
    float* head = heads.qkv;
    for (int h = 0; h < heads.num_heads; ++h, head += dim) {
        if (heads.q_norm) rms_norm(head, heads.q_norm, dim, heads.eps, head, F32);
        turn(head, heads, head);
    }
    Cache* key = static_cast<Cache*>(heads.key);
    for (int h = 0; h < heads.num_kv_heads; ++h, head += dim, key += heads.head_stride) {
        if (heads.k_norm) rms_norm(head, heads.k_norm, dim, heads.eps, head, F32);
        turn(head, heads, key);
    }
    Cache* value = static_cast<Cache*>(heads.value);
    for (int h = 0; h < heads.num_kv_heads; ++h, head += dim, value += heads.head_stride)
        for (int64_t i = 0; i < dim; i += LANES) store_upto(value + i, load_upto(head + i, dim - i), dim - i);
}

void turn_and_keep(const HeadsOfToken& heads) {
    heads.kv_dtype == BF16 ? turn_and_keep_as<bf16>(heads) : turn_and_keep_as<float>(heads);
}

void largest(const float* x, int64_t n, int32_t first_index, float* most, int32_t* at) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const float here = reduce_max(load(x + i));
        if (!(here > *most)) continue;
        *most = here;
        for (int64_t j = i; j < i + LANES; ++j) {
            if (x[j] != here) continue;
            *at = first_index + static_cast<int32_t>(j);
            break;
        }
    }
    for (; i < n; ++i) {
        if (!(x[i] > *most)) continue;
        *most = x[i];
        *at = first_index + static_cast<int32_t>(i);
    }
}

}  // namespace
}  // namespace pe
