// Row-wise operations and the writes to the KV cache, compiled once for each instruction set. See rowwise.h, kv_cache.h.
#pragma once

#include "rowwise_kernels.h"
#include "vector.h"

namespace pe {
namespace {

constexpr float LOG2_E = 1.44269504f;

// As it would be after a store to T and a load.
PE_ALWAYS_INLINE f32v rounded_to(f32v v, const float*) { return v; }
PE_ALWAYS_INLINE f32v rounded_to(f32v v, const bf16*) { return widen(round_to_bf16(v)); }

PE_ALWAYS_INLINE float scalar_sqrt(float x) { return __builtin_sqrtf(x); }

template <typename T, typename Weight, typename Out>
PE_ALWAYS_INLINE void rms_norm_row(const T* x, const T* residual, T* total, const Weight* weight, Out* out, int64_t size,
                                   float eps) {
    f32v squares[2] = {};  // two sums, so that an addition need not wait for the one before
    each_vector(size, [&](int64_t i, auto left) {
        f32v v = load_upto(x + i, left);
        if (residual != nullptr) {
            v = rounded_to(v + load_upto(residual + i, left), x);
            store_upto(total + i, v, left);
        }
        const f32v next = fma(v, v, squares[1]);
        squares[1] = squares[0];
        squares[0] = next;
    });
    const T* const from = residual == nullptr ? x : total;
    const float sum = reduce_add(squares[0] + squares[1]);
    const f32v factor = splat(1.0f / scalar_sqrt(sum / static_cast<float>(size) + eps));
    each_vector(size, [&](int64_t i, auto left) {
        const f32v v = rounded_to(load_upto(from + i, left) * factor, x);
        store_upto(out + i, v * load_upto(weight + i, left), left);
    });
}

template <typename T, typename Weight, typename Out>
void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
        rms_norm_row(static_cast<const T*>(args.x) + r * args.x_stride,
                     args.residual ? static_cast<const T*>(args.residual) + r * args.residual_stride : nullptr,
                     static_cast<T*>(args.total) + r * args.total_stride, static_cast<const Weight*>(args.weight),
                     static_cast<Out*>(args.out) + r * args.out_stride, args.size, args.eps);
}

template <typename T, typename Weight>
void rms_norm_out(const RmsNormArgs& args, int64_t begin, int64_t end) {
    args.out_dtype == BF16 ? rms_norm_rows<T, Weight, bf16>(args, begin, end)
                           : rms_norm_rows<T, Weight, float>(args, begin, end);
}

template <typename T>
void rms_norm_weight(const RmsNormArgs& args, int64_t begin, int64_t end) {
    args.weight_dtype == BF16 ? rms_norm_out<T, bf16>(args, begin, end) : rms_norm_out<T, float>(args, begin, end);
}

void rms_norm_any(const RmsNormArgs& args, int64_t begin, int64_t end) {
    args.dtype == BF16 ? rms_norm_weight<bf16>(args, begin, end) : rms_norm_weight<float>(args, begin, end);
}

PE_ALWAYS_INLINE f32v silu(f32v x) {
    // Beyond 2^126 the quotient is next to nothing anyway. x is second, so that NaN stays.
    const f32v power = x * -LOG2_E;
    return x / (1.0f + exp2_clamped(-max(splat(-126.0f), -power)));
}

template <typename T>
void silu_and_mul_rows(const SiluAndMulArgs& args, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const T* const gate = static_cast<const T*>(args.x) + r * args.x_stride;
        T* const out = static_cast<T*>(args.out) + r * args.out_stride;
        each_vector(args.size, [&](int64_t i, auto left) {
            const f32v activated = rounded_to(silu(load_upto(gate + i, left)), gate);
            store_upto(out + i, activated * load_upto(gate + args.size + i, left), left);
        });
    }
}

void silu_and_mul_any(const SiluAndMulArgs& args, int64_t begin, int64_t end) {
    args.dtype == BF16 ? silu_and_mul_rows<bf16>(args, begin, end) : silu_and_mul_rows<float>(args, begin, end);
}

// A product that is rounded before it is added to anything: no fused multiplication, so the bits are the reference's.
PE_ALWAYS_INLINE f32v product(f32v a, f32v b) {
    f32v result = a * b;
    PE_KEEP_IN_REGISTER(result);
    return result;
}

// x[i] turns with x[i + size / 2].
template <typename T>
PE_ALWAYS_INLINE void rotate(T* x, int64_t size, const float* cos, const float* sin) {
    const int64_t half = size / 2;
    each_vector(half, [&](int64_t i, auto left) {
        const f32v c = load_upto(cos + i, left), s = load_upto(sin + i, left);
        const f32v first = load_upto(x + i, left), second = load_upto(x + half + i, left);
        store_upto(x + i, product(first, c) - product(second, s), left);
        store_upto(x + half + i, product(second, c) + product(first, s), left);
    });
}

// The element that a value of T is kept as in a cache of Cache.
PE_ALWAYS_INLINE void keep(bf16* to, bf16 from) { *to = from; }
PE_ALWAYS_INLINE void keep(bf16* to, float from) { *to = to_bf16(from); }
PE_ALWAYS_INLINE void keep(float* to, bf16 from) { *to = to_float(from); }
PE_ALWAYS_INLINE void keep(float* to, float from) { *to = from; }

// Where a token's key or value goes: its block's memory of a kv head, and its place there.
struct Place {
    int64_t head;  // counted over the cache
    int64_t offset;
};

// A key and a value in the layout of a cache of Cache (kv_cache.h).
template <typename Cache>
struct KeepAs {
    static constexpr int64_t STEP = 4 / sizeof(Cache);

    template <typename T>
    PE_ALWAYS_INLINE static void key(const KVWriteArgs& args, Place place, const T* from) {
        Cache* const to = static_cast<Cache*>(args.keys) + place.head * args.block_size * args.head_dim + place.offset * STEP;
        for (int64_t i = 0; i < args.head_dim; i += STEP)
            for (int64_t j = 0; j < STEP; ++j) keep(to + i * args.block_size + j, from[i + j]);
    }

    template <typename T>
    PE_ALWAYS_INLINE static void value(const KVWriteArgs& args, Place place, const T* from) {
        Cache* const to = static_cast<Cache*>(args.values) + place.head * args.block_size * args.head_dim +
                          place.offset / STEP * STEP * args.head_dim + place.offset % STEP;
        for (int64_t i = 0; i < args.head_dim; ++i) keep(to + i * STEP, from[i]);
    }
};

template <>
struct KeepAs<int8_t> {
    template <typename T>
    PE_ALWAYS_INLINE static void key(const KVWriteArgs& args, Place place, const T* from) {
        uint8_t* const to = head(args.keys, args, place) + 4 * place.offset;
        const int64_t step = 4 * args.block_size;
        keep_scale(to + args.block_size * args.head_dim, quantize_head(from, args.head_dim, [&](int64_t i, int32_t q) {
                       to[i / 4 * step + i % 4] = static_cast<uint8_t>(q + 128);
                   }));
    }

    template <typename T>
    PE_ALWAYS_INLINE static void value(const KVWriteArgs& args, Place place, const T* from) {
        uint8_t* const begin = head(args.values, args, place);
        int8_t* const to = reinterpret_cast<int8_t*>(begin) + place.offset * args.head_dim;
        keep_scale(begin + args.block_size * args.head_dim + 4 * place.offset,
                   quantize_head(from, args.head_dim, [&](int64_t i, int32_t q) { to[i] = static_cast<int8_t>(q); }));
    }

    PE_ALWAYS_INLINE static uint8_t* head(void* cache, const KVWriteArgs& args, Place place) {
        return static_cast<uint8_t*>(cache) + place.head * int8_head_bytes(args.block_size, args.head_dim);
    }

    PE_ALWAYS_INLINE static void keep_scale(uint8_t* to, float scale) { std::memcpy(to, &scale, sizeof scale); }
};

template <typename T, typename Cache>
void write_tokens(const KVWriteArgs& args, int64_t begin, int64_t end) {
    const int64_t size = args.head_dim;
    for (int64_t t = begin; t < end; ++t) {
        const float* const cos = args.cos ? args.cos + args.positions[t] * (size / 2) : nullptr;
        const float* const sin = args.sin + (cos ? args.positions[t] * (size / 2) : 0);
        const auto turn = [&](T* head, const void* norm) {
            if (norm) rms_norm_row<T, T, T>(head, nullptr, nullptr, static_cast<const T*>(norm), head, size, args.eps);
            if (cos) rotate(head, size, cos, sin);
        };
        for (int64_t h = 0; args.q && h < args.num_heads; ++h)
            turn(static_cast<T*>(args.q) + t * args.q_stride + h * size, args.q_norm);

        const int64_t block = args.slot_mapping[t] / args.block_size, offset = args.slot_mapping[t] % args.block_size;
        for (int64_t h = 0; h < args.num_kv_heads; ++h) {
            const Place place{block * args.num_kv_heads + h, offset};
            T key[MAX_HEAD_DIM];
            std::memcpy(key, static_cast<const T*>(args.k) + t * args.k_stride + h * size, size * sizeof(T));
            turn(key, args.k_norm);
            KeepAs<Cache>::key(args, place, key);
            KeepAs<Cache>::value(args, place, static_cast<const T*>(args.v) + t * args.v_stride + h * size);
        }
    }
}

template <typename T>
void write_to_cache(const KVWriteArgs& args, int64_t begin, int64_t end) {
    switch (args.kv_dtype) {
        case BF16: return write_tokens<T, bf16>(args, begin, end);
        case INT8: return write_tokens<T, int8_t>(args, begin, end);
        default: return write_tokens<T, float>(args, begin, end);
    }
}

void write_kv_any(const KVWriteArgs& args, int64_t begin, int64_t end) {
    args.dtype == BF16 ? write_to_cache<bf16>(args, begin, end) : write_to_cache<float>(args, begin, end);
}

const RowwiseKernels kernels_here = {rms_norm_any, silu_and_mul_any, write_kv_any};

}  // namespace
}  // namespace pe
