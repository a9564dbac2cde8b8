/* What a search does in integers: scores of int8 keys, and the choice of the best of them.
 *
 * out[g * stride + i] = sum_j queries[g][j] * keys[ids[i]][j], in integers.
 *
 * One portable loop and what some processors do faster; integers do not round, so all give the same
 * scores to the bit. Which is used is decided once, when a module is loaded. A query has 16 bits a
 * channel and is small enough that a score fits 32 (see _quantise in _search.pyx).
 */
#ifndef OPENBOOK_INT8_H
#define OPENBOOK_INT8_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define OB_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define OB_X86 0
#endif
#define OB_INLINE static inline __attribute__((always_inline))

enum { OB_PORTABLE = 0, OB_AVX2 = 1, OB_AVX512 = 2 };
enum { OB_AT_ONCE = 8 };    /* keys whose sums are folded together */
enum { OB_HEADS_MAX = 8 };  /* query heads per pass over those keys */
enum { OB_WIDTH_MAX = 512 }; /* channels; beyond it the portable loop */

#if OB_X86
/* GCC before 13 does not know f16c by name: ask the processor (leaf 1, ECX bit 29). */
static int ob_has_avx2(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
           && __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}
#endif

/* The best of the three that this processor has. */
static int ob_best_level(void) {
#if OB_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vnni") && ob_has_avx2())
        return OB_AVX512;
    if (ob_has_avx2()) return OB_AVX2;
#endif
    return OB_PORTABLE;
}

static void ob_score_portable(const int16_t *queries, int64_t group, const int8_t *keys, int64_t d,
                              const uint32_t *ids, int64_t count, int32_t *out, int64_t stride) {
    for (int64_t i = 0; i < count; i++) {
        const int8_t *key = keys + (ids ? (int64_t)ids[i] : i) * d;
        for (int64_t g = 0; g < group; g++) {
            const int16_t *query = queries + g * d;
            int32_t sum = 0;
            for (int64_t j = 0; j < d; j++) sum += (int32_t)query[j] * (int32_t)key[j];
            out[g * stride + i] = sum;
        }
    }
}

#if OB_X86

/* Eight vectors to the sums of each, in order. */
__attribute__((target("avx2"))) OB_INLINE __m256i ob_eight_sums(const __m256i *a) {
    __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(a[4], a[5]), _mm256_hadd_epi32(a[6], a[7]));
    __m256i first = _mm256_permute2x128_si256(low, high, 0x20);
    __m256i second = _mm256_permute2x128_si256(low, high, 0x31);
    return _mm256_add_epi32(first, second);
}

/* Store the first `count` of eight sums. */
__attribute__((target("avx2"))) OB_INLINE void ob_put(__m256i sums, int64_t count, int32_t *out) {
    if (count == OB_AT_ONCE) {
        _mm256_storeu_si256((__m256i *)out, sums);
        return;
    }
    int32_t all[OB_AT_ONCE];
    _mm256_storeu_si256((__m256i *)all, sums);
    for (int64_t i = 0; i < count; i++) out[i] = all[i];
}

__attribute__((target("avx2"))) OB_INLINE void ob_score_body_avx2(
    const int16_t *queries, int64_t group, const int8_t *keys, int64_t d, const uint32_t *ids,
    int64_t count, int32_t *out, int64_t stride) {
    __m256i wide[OB_WIDTH_MAX / 16], sums[OB_HEADS_MAX][OB_AT_ONCE];
    for (int64_t i = 0; i < count; i += OB_AT_ONCE) {
        int64_t n = count - i < OB_AT_ONCE ? count - i : OB_AT_ONCE;
        for (int64_t t = 0; t < OB_AT_ONCE; t++) {
            int64_t at = i + (t < n ? t : n - 1);
            const int8_t *key = keys + (ids ? (int64_t)ids[at] : at) * d;
            for (int64_t j = 0; j < d / 16; j++)
                wide[j] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(key + 16 * j)));
            for (int64_t g = 0; g < group; g++) {
                const __m256i *query = (const __m256i *)(queries + g * d);
                __m256i sum = _mm256_setzero_si256();
                for (int64_t j = 0; j < d / 16; j++)
                    sum = _mm256_add_epi32(
                        sum, _mm256_madd_epi16(wide[j], _mm256_loadu_si256(query + j)));
                sums[g][t] = sum;
            }
        }
        for (int64_t g = 0; g < group; g++) ob_put(ob_eight_sums(sums[g]), n, out + g * stride + i);
    }
}

__attribute__((target("avx512f,avx512bw,avx512vnni,avx2"))) OB_INLINE void ob_score_body_avx512(
    const int16_t *queries, int64_t group, const int8_t *keys, int64_t d, const uint32_t *ids,
    int64_t count, int32_t *out, int64_t stride) {
    __m512i wide[OB_WIDTH_MAX / 32];
    __m256i sums[OB_HEADS_MAX][OB_AT_ONCE];
    for (int64_t i = 0; i < count; i += OB_AT_ONCE) {
        int64_t n = count - i < OB_AT_ONCE ? count - i : OB_AT_ONCE;
        for (int64_t t = 0; t < OB_AT_ONCE; t++) {
            int64_t at = i + (t < n ? t : n - 1);
            const int8_t *key = keys + (ids ? (int64_t)ids[at] : at) * d;
            for (int64_t j = 0; j < d / 32; j++)
                wide[j] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(key + 32 * j)));
            for (int64_t g = 0; g < group; g++) {
                const int16_t *query = queries + g * d;
                __m512i sum = _mm512_setzero_si512();
                for (int64_t j = 0; j < d / 32; j++)
                    sum = _mm512_dpwssd_epi32(sum, wide[j], _mm512_loadu_si512(query + 32 * j));
                sums[g][t] = _mm256_add_epi32(_mm512_castsi512_si256(sum),
                                              _mm512_extracti64x4_epi64(sum, 1));
            }
        }
        for (int64_t g = 0; g < group; g++) ob_put(ob_eight_sums(sums[g]), n, out + g * stride + i);
    }
}

/* The common sizes are constants to the compiler, which then keeps a key in registers. */
__attribute__((target("avx2"))) static void ob_score_avx2(
    const int16_t *queries, int64_t group, const int8_t *keys, int64_t d, const uint32_t *ids,
    int64_t count, int32_t *out, int64_t stride) {
    if (d == 64 && group == 3)
        ob_score_body_avx2(queries, 3, keys, 64, ids, count, out, stride);
    else if (d == 64) ob_score_body_avx2(queries, group, keys, 64, ids, count, out, stride);
    else if (d == 128) ob_score_body_avx2(queries, group, keys, 128, ids, count, out, stride);
    else ob_score_body_avx2(queries, group, keys, d, ids, count, out, stride);
}

__attribute__((target("avx512f,avx512bw,avx512vnni,avx2"))) static void ob_score_avx512(
    const int16_t *queries, int64_t group, const int8_t *keys, int64_t d, const uint32_t *ids,
    int64_t count, int32_t *out, int64_t stride) {
    if (d == 64) ob_score_body_avx512(queries, group, keys, 64, ids, count, out, stride);
    else if (d == 128) ob_score_body_avx512(queries, group, keys, 128, ids, count, out, stride);
    else ob_score_body_avx512(queries, group, keys, d, ids, count, out, stride);
}
#endif

/* Score `count` keys, those of `ids` or, with NULL, the first ones. */
static void ob_score_int8(int level, const int16_t *queries, int64_t group, const int8_t *keys,
                          int64_t d, const uint32_t *ids, int64_t count, int32_t *out,
                          int64_t stride) {
    for (int64_t g = 0; g < group; g += OB_HEADS_MAX) {
        int64_t heads = group - g < OB_HEADS_MAX ? group - g : OB_HEADS_MAX;
        const int16_t *mine = queries + g * d;
        int32_t *scores = out + g * stride;
#if OB_X86
        if (level == OB_AVX512 && d % 32 == 0 && d <= OB_WIDTH_MAX) {
            ob_score_avx512(mine, heads, keys, d, ids, count, scores, stride);
            continue;
        }
        if (level >= OB_AVX2 && d % 16 == 0 && d <= OB_WIDTH_MAX) {
            ob_score_avx2(mine, heads, keys, d, ids, count, scores, stride);
            continue;
        }
#endif
        ob_score_portable(mine, heads, keys, d, ids, count, scores, stride);
    }
}

#if OB_X86
__attribute__((target("avx2"))) static int64_t ob_reaching_avx2(const int32_t *scores,
                                                                int64_t count, int32_t bar,
                                                                uint32_t *places) {
    const __m256i below = _mm256_set1_epi32(bar - 1); /* a bar is no lower than -2^31 + 1 */
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += 8) {
        __m256i hit = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)(scores + i)), below);
        uint32_t bits = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(hit));
        for (; bits; bits &= bits - 1) places[kept++] = (uint32_t)i + (uint32_t)__builtin_ctz(bits);
    }
    return kept;
}
#endif

/* Put the `keep` largest of `count` different numbers first, in any order (Hoare's select). */
static void ob_keep_largest(int64_t *numbers, int64_t count, int64_t keep) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = numbers[low + (high - low) / 2], i = low, j = high;
        while (i <= j) {
            while (numbers[i] > middle) i++;
            while (numbers[j] < middle) j--;
            if (i <= j) {
                int64_t swapped = numbers[i];
                numbers[i++] = numbers[j];
                numbers[j--] = swapped;
            }
        }
        if (keep - 1 <= j) high = j;
        else if (keep - 1 >= i) low = i;
        else return;
    }
}

/* The same for packed candidates (_candidates.pxd), by counting their scores: far fewer branches
 * that nobody can foresee. `spare` has room for `count`. */
enum { OB_BINS = 1024 };
static void ob_keep_scores(int64_t *numbers, int64_t count, int64_t keep, int64_t *spare) {
    uint32_t bins[OB_BINS] = {0};
    int64_t low = INT64_MAX, high = INT64_MIN, held = 0, bin = OB_BINS, above = 0, tied = 0;
    int shift = 0;
    if (keep >= count) return;
    for (int64_t i = 0; i < count; i++) {
        int64_t score = numbers[i] >> 32;
        low = score < low ? score : low;
        high = score > high ? score : high;
    }
    while ((high - low) >> shift >= OB_BINS) shift++;
    for (int64_t i = 0; i < count; i++) bins[((numbers[i] >> 32) - low) >> shift]++;
    while (held < keep) held += bins[--bin];
    for (int64_t i = 0; i < count; i++) { /* the last bin wanted may hold too many */
        int64_t number = numbers[i], mine = ((number >> 32) - low) >> shift;
        numbers[above] = number;
        spare[tied] = number;
        above += mine > bin;
        tied += mine == bin;
    }
    ob_keep_largest(spare, tied, keep - above);
    memcpy(numbers + above, spare, (size_t)(keep - above) * sizeof *spare);
}

/* Sort different numbers, the largest first: insertion in gaps (Shell), for a hundred or so. */
static void ob_sort(int64_t *numbers, int64_t count) {
    static const int64_t gaps[] = {701, 301, 132, 57, 23, 10, 4, 1};
    for (int64_t n = 0; n < 8; n++)
        for (int64_t i = gaps[n]; i < count; i++) {
            int64_t number = numbers[i], j = i;
            for (; j >= gaps[n] && numbers[j - gaps[n]] < number; j -= gaps[n])
                numbers[j] = numbers[j - gaps[n]];
            numbers[j] = number;
        }
}

/* Where scores reach a bar: their places, in order; returns how many. */
static int64_t ob_reaching(int level, const int32_t *scores, int64_t count, int32_t bar,
                           uint32_t *places) {
    int64_t whole = 0, kept = 0;
#if OB_X86
    if (level >= OB_AVX2) {
        whole = count & ~(int64_t)7;
        kept = ob_reaching_avx2(scores, whole, bar, places);
    }
#endif
    for (int64_t i = whole; i < count; i++) {
        places[kept] = (uint32_t)i;
        kept += scores[i] >= bar;
    }
    return kept;
}

#endif
