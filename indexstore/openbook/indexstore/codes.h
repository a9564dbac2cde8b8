/* Sums of table lookups for keys in 4-bit codes, sixteen keys at a time.
 *
 * A key is one code of 4 bits per two channels; a query is a table of 16 small numbers per code,
 * and the approximate score of a key is the sum of what its codes look up (product quantisation;
 * in registers as in Andre et al., "Cache locality is not enough", VLDB 2015). A block is sixteen
 * keys: `quads` rows of 32 bytes, row r with the codes 4r and 4r + 1 in the low halves of its bytes
 * (sixteen keys each) and 4r + 2 and 4r + 3 in the high ones. No number of a table is above 63, so
 * that four of them fit a byte. Integers do not round: all ways give the same sums to the bit.
 * Besides: a query's tables, the levels of clusters on the same scale, how many sums reach a bar,
 * and the nearest codeword of a point.
 */
#ifndef OPENBOOK_CODES_H
#define OPENBOOK_CODES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "rows.h"

enum { OB_KEYS = 16, OB_ROW = 32 }; /* keys per block, bytes per row */

/* sums[t] = starts[t] + what key t looks up in `tables` (4 * quads, 16) */
static void ob_sums_portable(const uint8_t *tables, const uint8_t *block, int64_t quads,
                             const int16_t *starts, int16_t *sums) {
    for (int64_t t = 0; t < OB_KEYS; t++) sums[t] = starts[t];
    for (int64_t r = 0; r < quads; r++, tables += 64, block += OB_ROW)
        for (int64_t t = 0; t < OB_KEYS; t++)
            sums[t] = (int16_t)(sums[t] + tables[block[t] & 15] + tables[16 + (block[16 + t] & 15)]
                                + tables[32 + (block[t] >> 4)] + tables[48 + (block[16 + t] >> 4)]);
}

#if OB_X86
__attribute__((target("avx2"))) static uint32_t ob_reaching16_avx2(const int16_t *values,
                                                                      int16_t bar) {
    __m256i hits = _mm256_cmpgt_epi16(_mm256_loadu_si256((const __m256i *)values),
                                      _mm256_set1_epi16((int16_t)(bar - 1)));
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(hits),
                                    _mm256_extracti128_si256(hits, 1));
    return (uint32_t)_mm_movemask_epi8(bytes);
}

__attribute__((target("avx2"))) OB_INLINE __m256i ob_row_avx2(const uint8_t *tables,
                                                              const uint8_t *row) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i codes = _mm256_loadu_si256((const __m256i *)row);
    __m256i first = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)tables),
                                        _mm256_and_si256(codes, low));
    __m256i second = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)(tables + 32)),
                                         _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
    return _mm256_add_epi8(first, second);
}

__attribute__((target("avx2"))) OB_INLINE void ob_sums_body_avx2(
    const uint8_t *tables, const uint8_t *block, int64_t quads, const int16_t *starts,
    int16_t *sums) {
    const __m256i low = _mm256_set1_epi16(255);
    __m256i even = _mm256_setzero_si256(), odd = _mm256_setzero_si256();
    for (int64_t r = 0; r < quads; r += 2) { /* two rows: sums of four lookups stay below 256 */
        __m256i four = ob_row_avx2(tables + 64 * r, block + OB_ROW * r);
        if (r + 1 < quads)
            four = _mm256_add_epi8(four, ob_row_avx2(tables + 64 * (r + 1),
                                                     block + OB_ROW * (r + 1)));
        even = _mm256_add_epi16(even, _mm256_and_si256(four, low));
        odd = _mm256_add_epi16(odd, _mm256_srli_epi16(four, 8));
    }
    /* Each half of a row had codes of its own for the same sixteen keys. */
    __m128i evens = _mm_add_epi16(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
    __m128i odds = _mm_add_epi16(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
    __m256i all = _mm256_set_m128i(_mm_unpackhi_epi16(evens, odds),
                                   _mm_unpacklo_epi16(evens, odds));
    all = _mm256_add_epi16(all, _mm256_loadu_si256((const __m256i *)starts));
    _mm256_storeu_si256((__m256i *)sums, all);
}

__attribute__((target("avx2"))) static void ob_sums_avx2(
    const uint8_t *tables, const uint8_t *block, int64_t quads, const int16_t *starts,
    int16_t *sums) {
    if (quads == 8) ob_sums_body_avx2(tables, block, 8, starts, sums);
    else if (quads == 16) ob_sums_body_avx2(tables, block, 16, starts, sums);
    else ob_sums_body_avx2(tables, block, quads, starts, sums);
}
#endif

static void ob_sums(int level, const uint8_t *tables, const uint8_t *block, int64_t quads,
                    const int16_t *starts, int16_t *sums) {
#if OB_X86
    if (level >= OB_AVX2) {
        ob_sums_avx2(tables, block, quads, starts, sums);
        return;
    }
#endif
    ob_sums_portable(tables, block, quads, starts, sums);
}

enum { OB_TABLE_MAX = 63 }; /* four entries of a table fit a byte */
enum { OB_SUM_MAX = 16128 }; /* of all entries: with a base from OB_BASE_MIN on it fits 16 bits */
enum { OB_BASE_MIN = -16000 };

/* How much wider than for the average query the scores of a cluster's keys lie. `turned` (count) is
 * the query in the directions of the codes, `spreads` (count) what the keys' differences are along
 * them. */
static float ob_width(const float *turned, const float *spreads, int64_t count) {
    float wide = 0;
    for (int64_t j = 0; j < count; j++) {
        float one = turned[j] * spreads[j];
        wide += one * one;
    }
    return sqrtf(wide);
}

/* Round what each code adds to a score to tables (4 * quads, 16) of small integers; returns units a
 * score. `codebook` (pairs, 16, 2), `raw` room for (pairs, 16) floats; `span` is how far the scores
 * of the centroids lie apart. `zero` becomes the sum of a key that lies at its centroid. */
OB_CLONES static float ob_tabulate(const float *turned, const float *codebook, int64_t pairs,
                                   int64_t quads, float span, float *raw, uint8_t *tables,
                                   float *zero) {
    int64_t most = OB_SUM_MAX / (4 * quads);
    float widest = 0, at_centroid = 0, inverse;
    most = most < OB_TABLE_MAX ? most : OB_TABLE_MAX;
    for (int64_t j = 0; j < pairs; j++, codebook += 32) {
        float *row = raw + 16 * j, low, high;
        for (int64_t c = 0; c < 16; c++)
            row[c] = turned[2 * j] * codebook[2 * c] + turned[2 * j + 1] * codebook[2 * c + 1];
        ob_v8 first = *(const ob_v8 *)row, second = *(const ob_v8 *)(row + 8);
        ob_i8 lower = first < second;
        ob_v8 down = (ob_v8)(((ob_i8)first & lower) | ((ob_i8)second & ~lower));
        ob_v8 up = (ob_v8)(((ob_i8)second & lower) | ((ob_i8)first & ~lower));
        low = down[0];
        high = up[0];
        for (int64_t t = 1; t < 8; t++) {
            low = down[t] < low ? down[t] : low;
            high = up[t] > high ? up[t] : high;
        }
        *(ob_v8 *)row = first - low;
        *(ob_v8 *)(row + 8) = second - low;
        widest = high - low > widest ? high - low : widest;
        at_centroid -= low;
    }
    widest = widest / (float)most;
    if (span / (float)-OB_BASE_MIN > widest) widest = span / (float)-OB_BASE_MIN;
    inverse = widest > 0 ? 1.0f / widest : 0.0f;
    memset(tables, 0, (size_t)(64 * quads));
    for (int64_t j = 0; j < 16 * pairs; j++) { /* in range even where codewords are not numbers */
        float entry = raw[j] * inverse + 0.5f;
        entry = entry < (float)most ? entry : (float)most;
        tables[j] = (uint8_t)(int32_t)(entry > 0.0f ? entry : 0.0f);
    }
    *zero = at_centroid * inverse;
    return inverse;
}

/* The level of each cluster: its centroid's, from OB_BASE_MIN to 0 whatever the logits hold (a NaN
 * may hide their peak), and of the best key it may have. Numbers are cut off towards zero. */
OB_CLONES static void ob_levels(const float *logits, const float *spreads, int64_t count,
                                float peak, float inverse, float zero, float reach, int16_t *bases,
                                int16_t *bounds) {
    const float lowest = OB_BASE_MIN;
    for (int64_t c = 0; c < count; c++) {
        float base = (logits[c] - peak) * inverse, bound = base + (zero + reach * spreads[c]);
        base = base > lowest ? base : lowest;
        base = base < 0.0f ? base : 0.0f;
        bound = bound > -32767.0f ? bound : -32767.0f;
        bound = bound < 32767.0f ? bound : 32767.0f;
        bases[c] = (int16_t)(int32_t)base;
        bounds[c] = (int16_t)(int32_t)bound;
    }
}

/* Which of sixteen numbers reach a bar (> -32768), a bit each. */
static uint32_t ob_reaching16(int level, const int16_t *values, int16_t bar) {
    uint32_t bits = 0;
#if OB_X86
    if (level >= OB_AVX2) return ob_reaching16_avx2(values, bar);
#endif
    for (int64_t t = 0; t < 16; t++) bits |= (uint32_t)(values[t] >= bar) << t;
    return bits;
}

typedef int16_t ob_s16 __attribute__((vector_size(32), aligned(2)));

/* How many of `count` sums, whole blocks of 16, reach a bar (> -32768). */
OB_CLONES static int64_t ob_count_reaching(const int16_t *sums, int64_t count, int16_t bar) {
    int64_t total = 0;
    for (int64_t i = 0; i < count;) {
        ob_s16 held = {0};
        int16_t lanes[16];
        int64_t end = count - i > 16 * 32767 ? i + 16 * 32767 : count; /* what 16 bits can count */
        for (; i < end; i += 16) held -= *(const ob_s16 *)(sums + i) >= bar;
        *(ob_s16 *)lanes = held;
        for (int64_t t = 0; t < 16; t++) total += lanes[t];
    }
    return total;
}

/* The largest of `count` >= 16 sums, whole blocks of 16. */
OB_CLONES static int16_t ob_largest(const int16_t *sums, int64_t count) {
    ob_s16 most = *(const ob_s16 *)sums;
    int16_t lanes[16], largest = -32768;
    for (int64_t i = 16; i < count; i += 16) {
        ob_s16 here = *(const ob_s16 *)(sums + i), higher = here > most;
        most = (here & higher) | (most & ~higher);
    }
    *(ob_s16 *)lanes = most;
    for (int64_t t = 0; t < 16; t++) largest = lanes[t] > largest ? lanes[t] : largest;
    return largest;
}

/* The highest bar, `low` or above, that `wanted` of the sums reach; `low` if fewer reach that. */
static int16_t ob_bar(const int16_t *sums, int64_t count, int64_t wanted, int16_t low) {
    int32_t below = low, above = count ? ob_largest(sums, count) + 1 : low;
    while (above - below > 1) {
        int32_t middle = below + (above - below) / 2;
        if (ob_count_reaching(sums, count, (int16_t)middle) >= wanted) below = middle;
        else above = middle;
    }
    return (int16_t)below;
}

/* cells[i] = the nearest of 16 codewords to the point (x[i], y[i]), the lower on a tie. `words`
 * (3, 16): their two coordinates and half their squared lengths. */
OB_CLONES static void ob_cells(const float *x, const float *y, int64_t count, const float *words,
                               int32_t *cells) {
    for (int64_t i = 0; i < count; i += 8) {
        float here[2][8] = {{0}};
        int32_t chosen[8];
        int64_t some = count - i < 8 ? count - i : 8;
        memcpy(here[0], x + i, (size_t)some * sizeof(float));
        memcpy(here[1], y + i, (size_t)some * sizeof(float));
        ob_v8 first = *(const ob_v8 *)here[0], second = *(const ob_v8 *)here[1];
        ob_v8 best = first * words[0] + second * words[16] - words[32];
        ob_i8 cell = {0};
        for (int32_t c = 1; c < 16; c++) {
            ob_v8 affinity = first * words[c] + second * words[16 + c] - words[32 + c];
            ob_i8 nearer = affinity > best;
            best = (ob_v8)(((ob_i8)affinity & nearer) | ((ob_i8)best & ~nearer));
            cell = (c & nearer) | (cell & ~nearer);
        }
        *(ob_i8 *)chosen = cell;
        memcpy(cells + i, chosen, (size_t)some * sizeof(int32_t));
    }
}

/* target[0..16) = value */
static void ob_fill(int16_t value, int16_t *target) {
    for (int64_t t = 0; t < OB_KEYS; t++) target[t] = value;
}

#endif
