/* The arithmetic of the middle: widening, logits, weights, a blocked exact scan.
 *
 * Nothing here allocates, knows Python or checks its input: attend.py has checked it. Vectors are
 * GCC/Clang vector types, lowered to whatever the target has; on x86-64 with glibc the functions
 * marked OB_CLONES are compiled for several instruction sets and chosen when the module is loaded.
 */
#ifndef OPENBOOK_KERNELS_H
#define OPENBOOK_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "int8.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) \
    && !defined(__clang__) && __GNUC__ >= 12
#define OB_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OB_CLONES
#endif
#define OB_INLINE static inline __attribute__((always_inline))

enum { OB_FLOAT16 = 0, OB_BFLOAT16 = 1, OB_FLOAT32 = 2 };
enum { OB_BLOCK = 32 }; /* keys per block of the exact scan: four vectors of eight scores */

typedef float ob_v8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t ob_i8 __attribute__((vector_size(32), aligned(4)));

OB_INLINE void ob_prefetch(const void *address) { __builtin_prefetch(address); }

/* The number of the lowest bit that is set; the word is little-endian, and not 0. */
OB_INLINE int64_t ob_lowest_bit(uint64_t word) { return __builtin_ctzll(word); }

OB_INLINE float ob_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Widen `count` stored numbers to float32. Finite input only: infinities were refused at ingest. */
OB_INLINE void ob_widen(const void *source, int dtype, int64_t count, float *target) {
    if (dtype == OB_FLOAT32) {
        memcpy(target, source, (size_t)count * sizeof(float));
    } else if (dtype == OB_BFLOAT16) {
        const uint16_t *half = (const uint16_t *)source;
        for (int64_t i = 0; i < count; i++) target[i] = ob_from_bits((uint32_t)half[i] << 16);
    } else {
        /* A half's exponent and mantissa, read as a float, is the value times 2^-112. */
        const uint16_t *half = (const uint16_t *)source;
        for (int64_t i = 0; i < count; i++) {
            uint32_t magnitude = (uint32_t)(half[i] & 0x7fff) << 13;
            uint32_t sign = (uint32_t)(half[i] & 0x8000) << 16;
            float value = ob_from_bits(magnitude) * 0x1p112f;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            target[i] = ob_from_bits(bits | sign);
        }
    }
}

#if OB_X86
/* The processor's own widening: the same floats. `count` is a multiple of eight. */
__attribute__((target("avx2,f16c"))) static void ob_widen_f16c(const uint16_t *source,
                                                               int64_t count, float *target) {
    for (int64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(target + i,
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + i))));
}
#endif

OB_INLINE int64_t ob_stored_bytes(int dtype) { return dtype == OB_FLOAT32 ? 4 : 2; }

/* The sum of a vector's eight lanes, always in the same order. */
OB_INLINE float ob_sum(ob_v8 x) {
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

OB_INLINE float ob_dot(const float *a, const float *b, int64_t d) {
    ob_v8 sum = {0};
    int64_t j = 0;
    for (; j + 8 <= d; j += 8) sum += *(const ob_v8 *)(a + j) * *(const ob_v8 *)(b + j);
    float total = ob_sum(sum);
    for (; j < d; j++) total += a[j] * b[j];
    return total;
}

/* e^x for x <= 0, relative error below 2e-7; 0 below -87. Cephes' polynomial. */
OB_INLINE ob_v8 ob_exp(ob_v8 x) {
    const ob_v8 floor_value = {-87, -87, -87, -87, -87, -87, -87, -87};
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    ob_i8 tiny = x < floor_value;
    x = (ob_v8)(((ob_i8)x & ~tiny) | ((ob_i8)floor_value & tiny));
    ob_v8 n = (x * 1.44269504088896341f + magic) - magic;
    ob_v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    ob_v8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ob_i8 exponent = (__builtin_convertvector(n, ob_i8) + 127) << 23;
    return (ob_v8)((ob_i8)(p * (ob_v8)exponent) & ~tiny);
}

#if OB_X86
/* Eight rows against one query, each sum in the order of ob_dot: the same floats to the bit. */
__attribute__((target("avx2"))) static void ob_eight_dots(const float *query,
                                                          const float *const rows[8], int64_t d,
                                                          float scaling, float *out) {
    __m256 a[8];
    for (int64_t t = 0; t < 8; t++) a[t] = _mm256_setzero_ps();
    for (int64_t j = 0; j < d; j += 8) {
        __m256 q = _mm256_loadu_ps(query + j);
        for (int64_t t = 0; t < 8; t++)
            a[t] = _mm256_add_ps(a[t], _mm256_mul_ps(q, _mm256_loadu_ps(rows[t] + j)));
    }
    __m128 b[8];
    for (int64_t t = 0; t < 8; t++)
        b[t] = _mm_add_ps(_mm256_castps256_ps128(a[t]), _mm256_extractf128_ps(a[t], 1));
    __m128 low = _mm_hadd_ps(_mm_hadd_ps(b[0], b[1]), _mm_hadd_ps(b[2], b[3]));
    __m128 high = _mm_hadd_ps(_mm_hadd_ps(b[4], b[5]), _mm_hadd_ps(b[6], b[7]));
    __m256 sums = _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_set1_ps(scaling), sums));
}
#endif

/* What ob_logits does of whole groups of eight keys; returns how many keys that were. */
static int64_t ob_logits_by_eight(int level, const float *queries, int64_t group, const void *keys,
                                  int dtype, int64_t d, const uint32_t *ids, int64_t count,
                                  float scaling, float *logits, int64_t stride) {
    int64_t i = 0;
#if OB_X86
    float wide[8][OB_WIDTH_MAX];
    const float *rows[8];
    if (level < OB_AVX2 || d % 8 || d > OB_WIDTH_MAX) return 0;
    for (; i + 8 <= count; i += 8) {
        for (int64_t t = 0; t < 8; t++) {
            int64_t at = ids ? (int64_t)ids[i + t] : i + t;
            const char *key = (const char *)keys + at * d * ob_stored_bytes(dtype);
            if (dtype == OB_FLOAT32) {
                rows[t] = (const float *)key;
                continue;
            }
            if (dtype == OB_FLOAT16) ob_widen_f16c((const uint16_t *)key, d, wide[t]);
            else ob_widen(key, dtype, d, wide[t]);
            rows[t] = wide[t];
        }
        for (int64_t g = 0; g < group; g++)
            ob_eight_dots(queries + g * d, rows, d, scaling, logits + g * stride + i);
    }
#endif
    return i;
}

/* logits[g * stride + i] = scaling * q_g . keys[ids[i]], the stored keys widened. */
OB_CLONES static void ob_logits_one_by_one(const float *queries, int64_t group, const void *keys,
                                           int dtype, int64_t d, const uint32_t *ids,
                                           int64_t first, int64_t count, float scaling, float *row,
                                           float *logits, int64_t stride) {
    for (int64_t i = first; i < count; i++) {
        int64_t at = ids ? (int64_t)ids[i] : i;
        ob_widen((const char *)keys + at * d * ob_stored_bytes(dtype), dtype, d, row);
        for (int64_t g = 0; g < group; g++)
            logits[g * stride + i] = scaling * ob_dot(queries + g * d, row, d);
    }
}

static void ob_logits(int level, const float *queries, int64_t group, const void *keys, int dtype,
                      int64_t d, const uint32_t *ids, int64_t count, float scaling, float *row,
                      float *logits, int64_t stride) {
    int64_t done = ob_logits_by_eight(level, queries, group, keys, dtype, d, ids, count, scaling,
                                      logits, stride);
    ob_logits_one_by_one(queries, group, keys, dtype, d, ids, done, count, scaling, row, logits,
                         stride);
}

/* values[i] = e^(logits[i] - peak); returns their sum. */
OB_CLONES static double ob_weights(const float *logits, int64_t count, float peak,
                                   float *weights) {
    double total = 0;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        ob_v8 w = ob_exp(*(const ob_v8 *)(logits + i) - peak);
        *(ob_v8 *)(weights + i) = w;
        total += (double)ob_sum(w);
    }
    for (; i < count; i++) {
        weights[i] = expf(logits[i] - peak);
        total += (double)weights[i];
    }
    return total;
}

/* out += weight * row */
OB_INLINE void ob_add(float *out, const float *row, float weight, int64_t d) {
    for (int64_t j = 0; j < d; j++) out[j] += weight * row[j];
}

/* out[g] += sum_i weights[g * stride + i] * values[ids[i]] */
OB_CLONES static void ob_add_values(const float *weights, int64_t group, const void *values,
                                    int dtype, int64_t d, const uint32_t *ids, int64_t count,
                                    int64_t stride, float *row, float *out) {
    for (int64_t i = 0; i < count; i++) {
        const char *value = (const char *)values + (int64_t)ids[i] * d * ob_stored_bytes(dtype);
        ob_widen(value, dtype, d, row);
        for (int64_t g = 0; g < group; g++) ob_add(out + g * d, row, weights[g * stride + i], d);
    }
}

/* out[g] += sum_i weights[g * stride + i] * rows[i], rows float32 (count, d), zeros untouched. */
OB_CLONES static void ob_add_rows(const float *weights, int64_t group, const float *rows,
                                  int64_t d, int64_t count, int64_t stride, float *out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t g = 0; g < group; g++)
            if (weights[g * stride + i] != 0)
                ob_add(out + g * d, rows + i * d, weights[g * stride + i], d);
}

/* scores[c] = logits[c] + min(lift * spreads[c]^2, most) */
OB_CLONES static void ob_lifted(const float *logits, const float *spreads, int64_t count,
                                float lift, float most, float *scores) {
    for (int64_t c = 0; c < count; c++) {
        float more = lift * spreads[c] * spreads[c];
        scores[c] = logits[c] + (more < most ? more : most);
    }
}

/* The sum of weights[c] * counts[c]. */
OB_CLONES static double ob_mass(const float *weights, const float *counts, int64_t count) {
    double total = 0;
    int64_t c = 0;
    for (; c + 8 <= count; c += 8)
        total += (double)ob_sum(*(const ob_v8 *)(weights + c) * *(const ob_v8 *)(counts + c));
    for (; c < count; c++) total += (double)(weights[c] * counts[c]);
    return total;
}

/* ---- the exact scan: softmax over all keys for many rows, a block of keys at a time ---- */

/* scores of two rows against one transposed block (d, OB_BLOCK) */
OB_INLINE void ob_block_scores(const float *q0, const float *q1, const float *block, int64_t d,
                               float scaling, float *s0, float *s1) {
    ob_v8 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
    for (int64_t j = 0; j < d; j++) {
        const ob_v8 *k = (const ob_v8 *)(block + j * OB_BLOCK);
        a0 += q0[j] * k[0]; a1 += q0[j] * k[1]; a2 += q0[j] * k[2]; a3 += q0[j] * k[3];
        b0 += q1[j] * k[0]; b1 += q1[j] * k[1]; b2 += q1[j] * k[2]; b3 += q1[j] * k[3];
    }
    ob_v8 *t0 = (ob_v8 *)s0, *t1 = (ob_v8 *)s1;
    t0[0] = a0 * scaling; t0[1] = a1 * scaling; t0[2] = a2 * scaling; t0[3] = a3 * scaling;
    t1[0] = b0 * scaling; t1[1] = b1 * scaling; t1[2] = b2 * scaling; t1[3] = b3 * scaling;
}

/* Fold one block's scores of one row into its running peak, total and out. */
OB_INLINE void ob_fold(float *scores, int64_t count, const float *values, int64_t dv, float *peak,
                       double *total, float *out) {
    float best = *peak;
    for (int64_t i = 0; i < count; i++) best = scores[i] > best ? scores[i] : best;
    if (best > *peak) {
        float shrink = *total > 0 ? expf(*peak - best) : 0.0f;
        *total *= (double)shrink;
        for (int64_t j = 0; j < dv; j++) out[j] *= shrink;
        *peak = best;
    }
    ob_v8 sum = {0};
    for (int64_t i = count; i < OB_BLOCK; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < OB_BLOCK; i += 8) {
        ob_v8 w = ob_exp(*(const ob_v8 *)(scores + i) - best);
        *(ob_v8 *)(scores + i) = w;
        sum += w;
    }
    *total += (double)ob_sum(sum);
    int64_t j = 0;
    for (; j + 16 <= dv; j += 16) {
        ob_v8 a = *(const ob_v8 *)(out + j), b = *(const ob_v8 *)(out + j + 8);
        for (int64_t i = 0; i < count; i++) {
            const ob_v8 *v = (const ob_v8 *)(values + i * dv + j);
            a += scores[i] * v[0];
            b += scores[i] * v[1];
        }
        *(ob_v8 *)(out + j) = a;
        *(ob_v8 *)(out + j + 8) = b;
    }
    for (; j < dv; j++)
        for (int64_t i = 0; i < count; i++) out[j] += scores[i] * values[i * dv + j];
}

/* Attention of `rows` queries (rows, d) over keys first..last of one KV head.
 * out (rows, dv) is the un-normalised sum, peak (rows,) and total (rows,) its softmax state; all
 * three must be initialised (zeros, -inf, zeros) and may be carried from one call to the next.
 * scratch holds OB_BLOCK * (2 d + dv + 2) floats. */
OB_CLONES static void ob_exact(const float *queries, int64_t rows, const void *keys,
                               const void *values, int dtype, int64_t d, int64_t dv, int64_t first,
                               int64_t last, float scaling, float *scratch, float *peak,
                               double *total, float *out) {
    float *narrow = scratch, *block = narrow + OB_BLOCK * d, *wide = block + OB_BLOCK * d;
    float *s0 = wide + OB_BLOCK * dv, *s1 = s0 + OB_BLOCK;
    int64_t key_bytes = d * ob_stored_bytes(dtype), value_bytes = dv * ob_stored_bytes(dtype);
    for (int64_t start = first; start < last; start += OB_BLOCK) {
        int64_t count = last - start < OB_BLOCK ? last - start : OB_BLOCK;
        ob_widen((const char *)keys + start * key_bytes, dtype, count * d, narrow);
        ob_widen((const char *)values + start * value_bytes, dtype, count * dv, wide);
        for (int64_t i = 0; i < OB_BLOCK; i++)
            for (int64_t j = 0; j < d; j++)
                block[j * OB_BLOCK + i] = i < count ? narrow[i * d + j] : 0.0f;
        for (int64_t r = 0; r < rows; r += 2) {
            int64_t next = r + 1 < rows ? r + 1 : r;
            ob_block_scores(queries + r * d, queries + next * d, block, d, scaling, s0, s1);
            ob_fold(s0, count, wide, dv, peak + r, total + r, out + r * dv);
            if (next > r) ob_fold(s1, count, wide, dv, peak + next, total + next, out + next * dv);
        }
    }
}

#endif
