/* Rows of stored numbers: widened, multiplied with queries, summed with weights.
 *
 * Nothing here allocates, knows Python or checks its input: head.py has checked it. Vectors are
 * GCC/Clang vector types, lowered to whatever the target has; on x86-64 with glibc the functions
 * marked OB_CLONES are compiled for several instruction sets and chosen when the module is loaded.
 */
#ifndef OPENBOOK_ROWS_H
#define OPENBOOK_ROWS_H

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

#if OB_X86
enum { OB_TOGETHER = 3 };  /* query heads per pass over four rows: twelve sums in registers */
enum { OB_AHEAD = 12 };    /* rows whose fetching begins before they are needed */
enum { OB_PAGE = 4096 };   /* where a processor's own foresight ends */

/* Eight stored numbers, widened: the same floats as ob_widen. */
__attribute__((target("avx2,f16c"))) OB_INLINE __m256 ob_eight(const char *row, int dtype,
                                                               int64_t j) {
    if (dtype == OB_FLOAT32) return _mm256_loadu_ps((const float *)row + j);
    __m128i half = _mm_loadu_si128((const __m128i *)(row + 2 * j));
    if (dtype == OB_FLOAT16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* Four rows against `heads` queries, each sum in the order of ob_dot: the same to the bit. */
__attribute__((target("avx2,f16c"))) OB_INLINE void ob_four_rows(
    const float *queries, int64_t heads, const char *const rows[4], int dtype, int64_t d,
    float scaling, float *logits, int64_t stride) {
    __m256 sums[OB_TOGETHER][4];
    for (int64_t g = 0; g < heads; g++)
        for (int64_t t = 0; t < 4; t++) sums[g][t] = _mm256_setzero_ps();
    for (int64_t j = 0; j < d; j += 8) {
        __m256 row[4];
        for (int64_t t = 0; t < 4; t++) row[t] = ob_eight(rows[t], dtype, j);
        for (int64_t g = 0; g < heads; g++) {
            __m256 query = _mm256_loadu_ps(queries + g * d + j);
            for (int64_t t = 0; t < 4; t++)
                sums[g][t] = _mm256_add_ps(sums[g][t], _mm256_mul_ps(query, row[t]));
        }
    }
    for (int64_t g = 0; g < heads; g++) {
        __m128 b[4];
        for (int64_t t = 0; t < 4; t++)
            b[t] = _mm_add_ps(_mm256_castps256_ps128(sums[g][t]),
                              _mm256_extractf128_ps(sums[g][t], 1));
        __m128 all = _mm_hadd_ps(_mm_hadd_ps(b[0], b[1]), _mm_hadd_ps(b[2], b[3]));
        _mm_storeu_ps(logits + g * stride, _mm_mul_ps(_mm_set1_ps(scaling), all));
    }
}

__attribute__((target("avx2,f16c"))) OB_INLINE int64_t ob_logits_of(
    const float *queries, int64_t heads, const char *keys, int dtype, int64_t d,
    const uint32_t *ids, int64_t count, float scaling, float *logits, int64_t stride) {
    int64_t i = 0, bytes = d * ob_stored_bytes(dtype);
    for (; i + 4 <= count; i += 4) {
        const char *rows[4];
        for (int64_t t = 0; t < 4; t++) {
            rows[t] = keys + (ids ? (int64_t)ids[i + t] : i + t) * bytes;
            int64_t next = i + t + (ids ? OB_AHEAD : OB_PAGE / bytes); /* over a page's end */
            if (next < count)
                for (int64_t at = 0; at < bytes; at += 64)
                    ob_prefetch(keys + (ids ? (int64_t)ids[next] : next) * bytes + at);
        }
        ob_four_rows(queries, heads, rows, dtype, d, scaling, logits + i, stride);
    }
    return i;
}

__attribute__((target("avx2,f16c"))) OB_INLINE int64_t ob_logits_sized(
    const float *queries, int64_t heads, const char *keys, int dtype, int64_t d,
    const uint32_t *ids, int64_t count, float scaling, float *logits, int64_t stride) {
    if (heads == 1)
        return ob_logits_of(queries, 1, keys, dtype, d, ids, count, scaling, logits, stride);
    if (heads == 2)
        return ob_logits_of(queries, 2, keys, dtype, d, ids, count, scaling, logits, stride);
    return ob_logits_of(queries, 3, keys, dtype, d, ids, count, scaling, logits, stride);
}

__attribute__((target("avx2,f16c"))) static int64_t ob_logits_avx2(
    const float *queries, int64_t heads, const char *keys, int dtype, int64_t d,
    const uint32_t *ids, int64_t count, float scaling, float *logits, int64_t stride) {
    if (dtype == OB_FLOAT16)
        return ob_logits_sized(queries, heads, keys, OB_FLOAT16, d, ids, count, scaling, logits,
                               stride);
    if (dtype == OB_BFLOAT16)
        return ob_logits_sized(queries, heads, keys, OB_BFLOAT16, d, ids, count, scaling, logits,
                               stride);
    return ob_logits_sized(queries, heads, keys, OB_FLOAT32, d, ids, count, scaling, logits,
                           stride);
}
#endif

/* What ob_logits does of whole groups of four keys; returns how many keys that were. */
static int64_t ob_logits_by_four(int level, const float *queries, int64_t group, const void *keys,
                                 int dtype, int64_t d, const uint32_t *ids, int64_t count,
                                 float scaling, float *logits, int64_t stride) {
    int64_t done = 0;
#if OB_X86
    if (level < OB_AVX2 || d % 8) return 0;
    for (int64_t g = 0; g < group; g += OB_TOGETHER) {
        int64_t heads = group - g < OB_TOGETHER ? group - g : OB_TOGETHER;
        done = ob_logits_avx2(queries + g * d, heads, (const char *)keys, dtype, d, ids, count,
                              scaling, logits + g * stride, stride);
    }
#endif
    return done;
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
    int64_t done = ob_logits_by_four(level, queries, group, keys, dtype, d, ids, count, scaling,
                                     logits, stride);
    ob_logits_one_by_one(queries, group, keys, dtype, d, ids, done, count, scaling, row, logits,
                         stride);
}

/* out += weight * row */
OB_INLINE void ob_add(float *out, const float *row, float weight, int64_t d) {
    for (int64_t j = 0; j < d; j++) out[j] += weight * row[j];
}

/* out[g] += sum_i weights[g * stride + i] * rows[ids[i]], the stored rows widened. */
OB_CLONES static void ob_add_one_by_one(const float *weights, int64_t group, const void *rows,
                                        int dtype, int64_t d, const uint32_t *ids, int64_t count,
                                        int64_t stride, float *row, float *out) {
    for (int64_t i = 0; i < count; i++) {
        ob_widen((const char *)rows + (int64_t)ids[i] * d * ob_stored_bytes(dtype), dtype, d, row);
        for (int64_t g = 0; g < group; g++) ob_add(out + g * d, row, weights[g * stride + i], d);
    }
}

#if OB_X86
/* The same for four vectors of eight channels and `heads` query heads: twelve sums in registers. */
__attribute__((target("avx2,f16c,fma"))) OB_INLINE void ob_add_channels(
    const float *weights, int64_t heads, const char *rows, int dtype, int64_t bytes,
    int64_t channel, int64_t vectors, const uint32_t *ids, int64_t count, int64_t stride,
    float *out, int64_t d) {
    __m256 sums[OB_TOGETHER][4];
    for (int64_t g = 0; g < heads; g++)
        for (int64_t t = 0; t < vectors; t++)
            sums[g][t] = _mm256_loadu_ps(out + g * d + channel + 8 * t);
    for (int64_t i = 0; i < count; i++) {
        const char *row = rows + (int64_t)ids[i] * bytes;
        __m256 part[4];
        if (channel == 0 && i + OB_AHEAD < count)
            for (int64_t at = 0; at < bytes; at += 64)
                ob_prefetch(rows + (int64_t)ids[i + OB_AHEAD] * bytes + at);
        for (int64_t t = 0; t < vectors; t++) part[t] = ob_eight(row, dtype, channel + 8 * t);
        for (int64_t g = 0; g < heads; g++) {
            __m256 weight = _mm256_set1_ps(weights[g * stride + i]);
            for (int64_t t = 0; t < vectors; t++)
                sums[g][t] = _mm256_fmadd_ps(weight, part[t], sums[g][t]);
        }
    }
    for (int64_t g = 0; g < heads; g++)
        for (int64_t t = 0; t < vectors; t++)
            _mm256_storeu_ps(out + g * d + channel + 8 * t, sums[g][t]);
}

__attribute__((target("avx2,f16c,fma"))) OB_INLINE void ob_add_of(
    const float *weights, int64_t heads, const char *rows, int dtype, int64_t d,
    const uint32_t *ids, int64_t count, int64_t stride, float *out) {
    int64_t bytes = d * ob_stored_bytes(dtype), channel = 0;
    for (; channel + 32 <= d; channel += 32)
        ob_add_channels(weights, heads, rows, dtype, bytes, channel, 4, ids, count, stride, out,
                        d);
    for (; channel < d; channel += 8)
        ob_add_channels(weights, heads, rows, dtype, bytes, channel, 1, ids, count, stride, out,
                        d);
}

__attribute__((target("avx2,f16c,fma"))) static void ob_add_avx2(
    const float *weights, int64_t heads, const char *rows, int dtype, int64_t d,
    const uint32_t *ids, int64_t count, int64_t stride, float *out) {
    if (dtype == OB_FLOAT16 && heads == 3)
        ob_add_of(weights, 3, rows, OB_FLOAT16, d, ids, count, stride, out);
    else if (dtype == OB_FLOAT16 && heads == 2)
        ob_add_of(weights, 2, rows, OB_FLOAT16, d, ids, count, stride, out);
    else if (dtype == OB_FLOAT16)
        ob_add_of(weights, 1, rows, OB_FLOAT16, d, ids, count, stride, out);
    else if (dtype == OB_BFLOAT16)
        ob_add_of(weights, heads, rows, OB_BFLOAT16, d, ids, count, stride, out);
    else ob_add_of(weights, heads, rows, OB_FLOAT32, d, ids, count, stride, out);
}
#endif

static void ob_add_rows(int level, const float *weights, int64_t group, const void *rows,
                        int dtype, int64_t d, const uint32_t *ids, int64_t count, int64_t stride,
                        float *row, float *out) {
#if OB_X86
    if (level >= OB_AVX2 && d % 8 == 0) {
        for (int64_t g = 0; g < group; g += OB_TOGETHER) {
            int64_t heads = group - g < OB_TOGETHER ? group - g : OB_TOGETHER;
            ob_add_avx2(weights + g * stride, heads, (const char *)rows, dtype, d, ids, count,
                        stride, out + g * d);
        }
        return;
    }
#endif
    ob_add_one_by_one(weights, group, rows, dtype, d, ids, count, stride, row, out);
}

#endif
