/* The arithmetic of the middle: weights, clusters, a blocked exact scan. Rows are in rows.h. */
#ifndef OPENBOOK_KERNELS_H
#define OPENBOOK_KERNELS_H

#include "rows.h"

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

/* The smallest and the largest of count >= 1 numbers. */
OB_CLONES static void ob_range(const float *numbers, int64_t count, float *low, float *high) {
    float least = numbers[0], most = numbers[0];
    int64_t i = 0;
    if (count >= 8) {
        ob_v8 down = *(const ob_v8 *)numbers, up = down;
        for (i = 8; i + 8 <= count; i += 8) {
            ob_v8 x = *(const ob_v8 *)(numbers + i);
            ob_i8 lower = x < down, higher = x > up;
            down = (ob_v8)(((ob_i8)x & lower) | ((ob_i8)down & ~lower));
            up = (ob_v8)(((ob_i8)x & higher) | ((ob_i8)up & ~higher));
        }
        for (int64_t t = 0; t < 8; t++) {
            least = down[t] < least ? down[t] : least;
            most = up[t] > most ? up[t] : most;
        }
    }
    for (; i < count; i++) {
        least = numbers[i] < least ? numbers[i] : least;
        most = numbers[i] > most ? numbers[i] : most;
    }
    *low = least;
    *high = most;
}

/* A sum of many vectors: lanes of floats for a while, so that few horizontal sums are taken. */
enum { OB_LANES_FOR = 16 * 8 };

/* Zero the weights of clusters that come to less than `least`; returns what those come to. */
OB_CLONES static double ob_drop_light(float *weights, const float *counts, int64_t count,
                                      float least) {
    double dropped = 0;
    int64_t c = 0;
    while (c + 8 <= count) {
        ob_v8 lanes = {0};
        for (int64_t end = c + OB_LANES_FOR; c + 8 <= count && c < end; c += 8) {
            ob_v8 weight = *(const ob_v8 *)(weights + c);
            ob_v8 mass = weight * *(const ob_v8 *)(counts + c);
            ob_i8 light = mass < least;
            *(ob_v8 *)(weights + c) = (ob_v8)((ob_i8)weight & ~light);
            lanes += (ob_v8)((ob_i8)mass & light);
        }
        dropped += (double)ob_sum(lanes);
    }
    for (; c < count; c++)
        if (weights[c] * counts[c] < least) {
            dropped += (double)(weights[c] * counts[c]);
            weights[c] = 0;
        }
    return dropped;
}

/* Move to the front the columns of weights (group, stride) that are not all zero, each times its
 * share; returns how many, and which in `columns`. */
OB_CLONES static int64_t ob_gather(float *weights, int64_t group, int64_t stride,
                                   const float *shares, uint32_t *columns) {
    int64_t count = 0;
    for (int64_t c = 0; c < stride; c++) { /* no branch: nobody can foresee which are heavy */
        float heaviest = 0;
        for (int64_t g = 0; g < group; g++) {
            float weight = weights[g * stride + c];
            heaviest += weight;
            weights[g * stride + count] = weight * shares[c];
        }
        columns[count] = (uint32_t)c;
        count += heaviest != 0;
    }
    return count;
}

/* weights[i] = e^(logits[i] - peak); returns their sum. */
OB_CLONES static double ob_weights(const float *logits, int64_t count, float peak,
                                   float *weights) {
    double total = 0;
    int64_t i = 0;
    while (i + 8 <= count) {
        ob_v8 lanes = {0};
        for (int64_t end = i + OB_LANES_FOR; i + 8 <= count && i < end; i += 8) {
            ob_v8 w = ob_exp(*(const ob_v8 *)(logits + i) - peak);
            *(ob_v8 *)(weights + i) = w;
            lanes += w;
        }
        total += (double)ob_sum(lanes);
    }
    for (; i < count; i++) {
        weights[i] = expf(logits[i] - peak);
        total += (double)weights[i];
    }
    return total;
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
    while (c + 8 <= count) {
        ob_v8 lanes = {0};
        for (int64_t end = c + OB_LANES_FOR; c + 8 <= count && c < end; c += 8)
            lanes += *(const ob_v8 *)(weights + c) * *(const ob_v8 *)(counts + c);
        total += (double)ob_sum(lanes);
    }
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
