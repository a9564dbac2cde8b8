"""The partial of one KV head's query heads over the keys read and the clusters of the rest.

What a search found, weighed under one maximum: each key read by its own score, each cluster by its
mean score times the keys of it that were not read. Their values are taken to be those of the whole
cluster in the mean. The NumPy twin is reference.combine.
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
    int64_t ob_gather(float *weights, int64_t group, int64_t stride, const float *shares,
                      uint32_t *columns)
    double ob_mass(const float *weights, const float *counts, int64_t count)

cdef enum:
    LIGHTEST_PARTS = 10  # all clusters that are not fetched come to 1 part of so many, at most


cdef struct Weights:
    # Per query head: e to a score less the peak, of each key read and of each key of a cluster.
    float *keys  # (group, r)
    float *clusters  # (group, c)
    float *peaks
    double *totals
    double *rests  # the clusters' part of the total
    double *fetched  # the part of the total whose values are summed
    # Of all query heads: the keys read, in runs of one cluster; in a head that is not stored in the
    # order of its clusters, a cluster may have several runs.
    int64_t run_count
    uint32_t *runs  # (r + 1,) the first key of each run, and the end of the last
    uint32_t *of  # (r,) the cluster of each run
    float *left  # (c,) how many keys each cluster holds besides those read
    float *shares  # (c,) what part of its keys they are
    # Of one query head at a time:
    double *sums  # (c,)
    float *scores  # (c,)
    uint32_t *heavy  # (c,)
    float *row  # (widest row,) a stored row, widened


cdef inline char *take(char **at, int64_t bytes_) noexcept nogil:
    # The next part of a block of memory, in whole cache lines.
    cdef char *mine = at[0]
    at[0] += (bytes_ + 63) // 64 * 64
    return mine


cdef inline void place(Head *head, int64_t group, int64_t read_max, int64_t clusters, char **at,
                       Weights *weights) noexcept nogil:
    # Place the arrays at the front of a block of memory, which shrinks by them.
    weights.keys = <float *>take(at, 4 * group * read_max)
    weights.clusters = <float *>take(at, 4 * group * clusters)
    weights.peaks = <float *>take(at, 4 * group)
    weights.totals = <double *>take(at, 8 * group)
    weights.rests = <double *>take(at, 8 * group)
    weights.fetched = <double *>take(at, 8 * group)
    weights.runs = <uint32_t *>take(at, 4 * (read_max + 1))
    weights.of = <uint32_t *>take(at, 4 * read_max)
    weights.left = <float *>take(at, 4 * clusters)
    weights.shares = <float *>take(at, 4 * clusters)
    weights.sums = <double *>take(at, 8 * clusters)
    weights.scores = <float *>take(at, 4 * clusters)
    weights.heavy = <uint32_t *>take(at, 4 * (clusters + 1))
    weights.row = <float *>take(at, 4 * max(head.d, head.dv))


cdef inline void _group_read(Head *head, const uint32_t *read, int64_t read_count,
                             Weights *weights) noexcept nogil:
    # Group the keys read by their clusters, and count what each cluster holds besides.
    cdef int64_t c, i, run
    cdef uint32_t cluster
    for c in range(head.clusters):
        weights.left[c] = <float>head.counts[c]
        weights.shares[c] = 1
    run = 0
    for i in range(read_count):
        cluster = head.cluster_of[read[i]]
        if run == 0 or cluster != weights.of[run - 1]:
            weights.runs[run] = <uint32_t>i
            weights.of[run] = cluster
            run += 1
    weights.runs[run] = <uint32_t>read_count
    weights.run_count = run
    for run in range(weights.run_count):
        weights.left[weights.of[run]] -= <float>(weights.runs[run + 1] - weights.runs[run])
    for run in range(weights.run_count):
        cluster = weights.of[run]
        weights.shares[cluster] = 0
        if weights.left[cluster] > 0:
            weights.shares[cluster] = weights.left[cluster] / <float>head.counts[cluster]


cdef inline void _scores(Head *head, const float *logits, const float *centroid_logits,
                         const float *lift, float lift_log_max, Weights *weights) noexcept nogil:
    # The score of each cluster for one query head; a spent one lies at -inf, whatever its mean.
    # With a lift: the mean of the keys that are left, and what their spread adds to its weight.
    # Only clusters of keys that were read have another mean than their centroid's.
    cdef int64_t c, i, run
    cdef double mean, total
    cdef float *scores = weights.scores
    cdef float *left = weights.left
    cdef double *sums = weights.sums
    if lift == NULL:
        memcpy(scores, centroid_logits, head.clusters * sizeof(float))
    else:
        ob_lifted(centroid_logits, head.spreads, head.clusters, lift[0], lift_log_max, scores)
        for run in range(weights.run_count):
            sums[weights.of[run]] = 0
        for run in range(weights.run_count):
            total = 0
            for i in range(weights.runs[run], weights.runs[run + 1]):
                total += logits[i]
            sums[weights.of[run]] += total
        for run in range(weights.run_count):
            c = weights.of[run]
            if left[c] > 0 and sums[c] != INFINITY:
                mean = (<double>head.counts[c] * <double>centroid_logits[c] - sums[c]) / left[c]
                scores[c] += <float>(mean - centroid_logits[c])
                sums[c] = INFINITY  # its score is done
    for run in range(weights.run_count):
        c = weights.of[run]
        if not left[c] > 0:
            scores[c] = -INFINITY


cdef inline float _peak(const float *logits, int64_t count, float start) noexcept nogil:
    # The largest logit.
    cdef float low, high
    if count == 0:
        return start
    ob_range(logits, count, &low, &high)
    return max(high, start)


cdef inline void _weigh(int64_t g, int64_t read_count, const float *logits, int64_t clusters,
                        Weights *weights) noexcept nogil:
    # Weights of one query head under one common maximum, and what they come to.
    cdef float *mine = weights.keys + g * read_count
    cdef float *theirs = weights.clusters + g * clusters
    cdef float peak = _peak(weights.scores, clusters, _peak(logits, read_count, -INFINITY))
    cdef float least
    weights.peaks[g], weights.totals[g], weights.rests[g], weights.fetched[g] = peak, 0, 0, 0
    if peak == -INFINITY:
        memset(mine, 0, read_count * sizeof(float))
        memset(theirs, 0, clusters * sizeof(float))
        return
    weights.totals[g] = weights.fetched[g] = ob_weights(logits, read_count, peak, mine)
    if clusters == 0:
        return
    ob_weights(weights.scores, clusters, peak, theirs)
    weights.rests[g] = ob_mass(theirs, weights.left, clusters)
    weights.totals[g] += weights.rests[g]
    # What is too light to show in the sum is not fetched: most of it lies far below this bound.
    least = <float>(weights.totals[g] / LIGHTEST_PARTS / clusters)
    weights.fetched[g] = weights.totals[g]
    weights.fetched[g] -= ob_drop_light(theirs, weights.left, clusters, least)


cdef inline void combine(int level, Head *head, int64_t group, const uint32_t *read,
                         int64_t read_count, const float *logits, const float *centroid_logits,
                         bint estimate, const float *lift, float lift_log_max,
                         Weights *weights, float *out, float *lse,
                         float *estimated_lse) noexcept nogil:
    # One partial under one common maximum: the keys read, then the clusters of the rest.
    cdef int64_t g, j, count, clusters = head.clusters if estimate else 0
    weights.run_count = 0
    if clusters > 0:
        _group_read(head, read, read_count, weights)
    for g in range(group):
        if clusters > 0:
            _scores(head, logits + g * read_count, centroid_logits + g * clusters,
                    lift + g if lift != NULL else NULL, lift_log_max, weights)
        _weigh(g, read_count, logits + g * read_count, clusters, weights)
    ob_add_rows(level, weights.keys, group, head.values, head.dtype, head.dv, read, read_count,
                read_count, weights.row, out)
    count = ob_gather(weights.clusters, group, clusters, weights.shares, weights.heavy)
    ob_add_rows(level, weights.clusters, group, head.value_sums, head.sum_dtype, head.dv,
                weights.heavy, count, clusters, weights.row, out)
    for g in range(group):
        lse[g] = estimated_lse[g] = -INFINITY
        if weights.peaks[g] == -INFINITY:
            continue
        for j in range(head.dv):
            out[g * head.dv + j] = <float>(out[g * head.dv + j] / weights.fetched[g])
        lse[g] = weights.peaks[g] + <float>log(weights.totals[g])
        if weights.rests[g] > 0:
            estimated_lse[g] = weights.peaks[g] + <float>log(weights.rests[g])
