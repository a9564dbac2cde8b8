"""The partial of one KV head's query heads over the keys read and the clusters of the rest.

What a search found, weighed under one maximum: each key read by its own score, each cluster by its
mean score times the keys of it that were not read. The NumPy twin is reference.combine.
"""

from libc.math cimport INFINITY, log
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy, memset

from openbook.indexstore._head cimport Head

cdef extern from "kernels.h" nogil:
    double ob_weights(const float *logits, int64_t count, float peak, float *weights)
    void ob_add_rows(int level, const float *weights, int64_t group, const void *rows, int dtype,
                     int64_t d, const uint32_t *ids, int64_t count, int64_t stride, float *row,
                     float *out)
    void ob_lifted(const float *logits, const float *spreads, int64_t count, float lift, float most,
                   float *scores)
    void ob_range(const float *numbers, int64_t count, float *low, float *high)
    double ob_drop_light(float *weights, const float *counts, int64_t count, float least)
    int64_t ob_gather(float *weights, int64_t group, int64_t stride, uint32_t *columns)
    double ob_mass(const float *weights, const float *counts, int64_t count)

cdef enum:
    LIGHTEST_PARTS = 100  # all clusters that are not fetched come to 1 part of so many, at most


cdef struct Weights:
    # Per query head: e to a score less the peak, of each key read and of each key of a cluster.
    float *keys  # (group, r)
    float *clusters  # (group, c)
    float *peaks
    double *totals
    double *rests  # the clusters' part of the total
    double *fetched  # the part of the total whose values are summed
    double *sums  # (c,)
    float *scores  # (c,)
    uint32_t *heavy  # (c,)


cdef inline void left_of(Head *head, const uint32_t *read, int64_t read_count,
                         float *counts) noexcept nogil:
    # How many keys each cluster holds besides those that were read.
    cdef int64_t c, i
    for c in range(head.clusters):
        counts[c] = <float>head.counts[c]
    for i in range(read_count):
        counts[head.cluster_of[read[i]]] -= 1


cdef inline void _scores(Head *head, const uint32_t *read, int64_t read_count, const float *logits,
                         const float *centroid_logits, const float *counts, const float *lift,
                         float lift_log_max, double *sums, float *scores) noexcept nogil:
    # The score of each cluster for one query head; a spent one lies at -inf, whatever its mean.
    # With a lift: the mean of the keys that are left, and what their spread adds to its weight.
    # Only clusters of keys that were read have another mean than their centroid's.
    cdef int64_t c, i
    cdef double mean
    if lift == NULL:
        memcpy(scores, centroid_logits, head.clusters * sizeof(float))
    else:
        ob_lifted(centroid_logits, head.spreads, head.clusters, lift[0], lift_log_max, scores)
        for i in range(read_count):
            sums[head.cluster_of[read[i]]] = 0
        for i in range(read_count):
            sums[head.cluster_of[read[i]]] += logits[i]
        for i in range(read_count):
            c = head.cluster_of[read[i]]
            if counts[c] > 0 and sums[c] != INFINITY:
                mean = (<double>head.counts[c] * <double>centroid_logits[c] - sums[c]) / counts[c]
                scores[c] += <float>(mean - centroid_logits[c])
                sums[c] = INFINITY  # its score is done
    for i in range(read_count):
        c = head.cluster_of[read[i]]
        if not counts[c] > 0:
            scores[c] = -INFINITY


cdef inline float _peak(const float *logits, int64_t count, float start) noexcept nogil:
    # The largest logit.
    cdef float low, high
    if count == 0:
        return start
    ob_range(logits, count, &low, &high)
    return max(high, start)


cdef inline void _weigh(Head *head, int64_t g, const uint32_t *read, int64_t read_count,
                        const float *logits, const float *scores, const float *counts,
                        int64_t clusters, Weights *weights) noexcept nogil:
    # Weights of one query head under one common maximum, and what they come to.
    cdef float *mine = weights.keys + g * read_count
    cdef float *theirs = weights.clusters + g * clusters
    cdef float peak = _peak(scores, clusters, _peak(logits, read_count, -INFINITY)), least
    cdef int64_t i
    weights.peaks[g], weights.totals[g], weights.rests[g], weights.fetched[g] = peak, 0, 0, 0
    if peak == -INFINITY:
        memset(mine, 0, read_count * sizeof(float))
        memset(theirs, 0, clusters * sizeof(float))
        return
    weights.totals[g] = weights.fetched[g] = ob_weights(logits, read_count, peak, mine)
    if clusters == 0:
        return
    ob_weights(scores, clusters, peak, theirs)
    weights.rests[g] = ob_mass(theirs, counts, clusters)
    weights.totals[g] += weights.rests[g]
    # What is too light to show in the sum is not fetched: most of it lies far below this bound.
    least = <float>(weights.totals[g] / LIGHTEST_PARTS / clusters)
    weights.fetched[g] = weights.totals[g] - ob_drop_light(theirs, counts, clusters, least)
    # A cluster's sum has the keys read in it: what it adds of each is taken off again.
    for i in range(read_count):
        mine[i] -= theirs[head.cluster_of[read[i]]]


cdef inline void combine(int level, Head *head, int64_t group, const uint32_t *read,
                         int64_t read_count, const float *logits, const float *centroid_logits,
                         const float *counts, const float *lift, float lift_log_max,
                         Weights *weights, float *row, float *out, float *lse,
                         float *estimated_lse) noexcept nogil:
    # One partial under one common maximum: the keys read, then the clusters of the rest.
    cdef int64_t g, j, count, clusters = head.clusters if counts != NULL else 0
    for g in range(group):
        if clusters > 0:
            _scores(head, read, read_count, logits + g * read_count,
                    centroid_logits + g * clusters, counts, lift + g if lift != NULL else NULL,
                    lift_log_max, weights.sums, weights.scores)
        _weigh(head, g, read, read_count, logits + g * read_count, weights.scores, counts, clusters,
               weights)
    ob_add_rows(level, weights.keys, group, head.values, head.dtype, head.dv, read, read_count,
                read_count, row, out)
    count = ob_gather(weights.clusters, group, clusters, weights.heavy)
    ob_add_rows(level, weights.clusters, group, head.value_sums, head.sum_dtype, head.dv,
                weights.heavy, count, clusters, row, out)
    for g in range(group):
        lse[g] = estimated_lse[g] = -INFINITY
        if weights.peaks[g] == -INFINITY:
            continue
        for j in range(head.dv):
            out[g * head.dv + j] = <float>(out[g * head.dv + j] / weights.fetched[g])
        lse[g] = weights.peaks[g] + <float>log(weights.totals[g])
        if weights.rests[g] > 0:
            estimated_lse[g] = weights.peaks[g] + <float>log(weights.rests[g])
