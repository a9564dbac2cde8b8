"""Attend to keys of one KV head: those a search found with the estimate of the rest, or all.

head.HeadIndex has checked every array; the loops release the GIL, create no Python objects and
never raise. Their NumPy twins are reference.combine and reference.softmax_partial.
"""

cimport numpy as cnp
from libc.math cimport INFINITY, log
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy, memset

from openbook.indexstore._head cimport Head, borrow

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int OB_BLOCK
    double ob_weights(const float *logits, int64_t count, float peak, float *weights)
    void ob_add_values(const float *weights, int64_t group, const void *values, int dtype,
                       int64_t d, const uint32_t *ids, int64_t count, int64_t stride, float *row,
                       float *out)
    void ob_lifted(const float *logits, const float *spreads, int64_t count, float lift, float most,
                   float *scores)
    double ob_mass(const float *weights, const float *counts, int64_t count)
    void ob_add_rows(const float *weights, int64_t group, const float *rows, int64_t d,
                     int64_t count, int64_t stride, float *out)
    void ob_exact(const float *queries, int64_t rows, const void *keys, const void *values,
                  int dtype, int64_t d, int64_t dv, int64_t first, int64_t last, float scaling,
                  float *scratch, float *peak, double *total, float *out)


cdef double LIGHTEST = 1e-9  # of the whole; all clusters that are lighter come to 4e-6 of it


cdef struct Weights:
    # Per query head: e to a score less the peak, of each key read and of each key of a cluster.
    float *keys  # (group, r)
    float *clusters  # (group, c)
    float *peaks
    double *totals
    double *rests  # the clusters' part of the total


cdef void _left(Head *head, const uint32_t *read, int64_t read_count, float *counts) noexcept nogil:
    # How many keys each cluster holds besides those that were read.
    cdef int64_t c, i
    for c in range(head.clusters):
        counts[c] = <float>head.counts[c]
    for i in range(read_count):
        counts[head.cluster_of[read[i]]] -= 1


cdef void _scores(Head *head, const uint32_t *read, int64_t read_count, const float *logits,
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


cdef float _peak(const float *logits, int64_t count, float start) noexcept nogil:
    # The largest logit.
    cdef int64_t i
    for i in range(count):
        if logits[i] > start:
            start = logits[i]
    return start


cdef void _weigh(Head *head, int64_t g, const uint32_t *read, int64_t read_count,
                 const float *logits, const float *scores, const float *counts, int64_t clusters,
                 Weights *weights) noexcept nogil:
    # Weights of one query head under one common maximum, and what they come to.
    cdef float *mine = weights.keys + g * read_count
    cdef float *theirs = weights.clusters + g * clusters
    cdef float peak = _peak(scores, clusters, _peak(logits, read_count, -INFINITY)), least
    cdef int64_t c, i
    weights.peaks[g], weights.totals[g], weights.rests[g] = peak, 0, 0
    if peak == -INFINITY:
        memset(mine, 0, read_count * sizeof(float))
        memset(theirs, 0, clusters * sizeof(float))
        return
    weights.totals[g] = ob_weights(logits, read_count, peak, mine)
    if clusters == 0:
        return
    ob_weights(scores, clusters, peak, theirs)
    weights.rests[g] = ob_mass(theirs, counts, clusters)
    weights.totals[g] += weights.rests[g]
    # What is too light to show in the sum is not fetched.
    least = <float>(weights.totals[g] * LIGHTEST)
    for c in range(clusters):
        if theirs[c] * counts[c] < least:
            theirs[c] = 0
    # A cluster's sum has the keys read in it: what it adds of each is taken off again.
    for i in range(read_count):
        mine[i] -= theirs[head.cluster_of[read[i]]]


cdef void _combine(Head *head, int64_t group, const uint32_t *read, int64_t read_count,
                   const float *logits, const float *centroid_logits, const float *counts,
                   const float *lift, float lift_log_max, double *scratch, float *scores,
                   Weights *weights, float *row, float *out, float *lse,
                   float *estimated_lse) noexcept nogil:
    # One partial under one common maximum: the keys read, then the clusters of the rest.
    cdef int64_t g, j, clusters = head.clusters if counts != NULL else 0
    for g in range(group):
        if clusters > 0:
            _scores(head, read, read_count, logits + g * read_count,
                    centroid_logits + g * clusters, counts, lift + g if lift != NULL else NULL,
                    lift_log_max, scratch, scores)
        _weigh(head, g, read, read_count, logits + g * read_count, scores, counts, clusters,
               weights)
    ob_add_values(weights.keys, group, head.values, head.dtype, head.dv, read, read_count,
                  read_count, row, out)
    ob_add_rows(weights.clusters, group, head.value_sums, head.dv, clusters, clusters, out)
    for g in range(group):
        lse[g] = estimated_lse[g] = -INFINITY
        if weights.peaks[g] == -INFINITY:
            continue
        for j in range(head.dv):
            out[g * head.dv + j] = <float>(out[g * head.dv + j] / weights.totals[g])
        lse[g] = weights.peaks[g] + <float>log(weights.totals[g])
        if weights.rests[g] > 0:
            estimated_lse[g] = weights.peaks[g] + <float>log(weights.rests[g])


def attend_read(object index, const uint32_t[::1] read, const float[:, ::1] logits,
                const float[:, ::1] centroid_logits, bint estimate,
                const float[::1] lift=None, float lift_log_max=0):
    """Attend every query head to the keys read, and to the clusters of the rest.

    `read` (r,) ids, `logits` (group, r), `centroid_logits` (group, c), unused without `estimate`.
    `lift` (group,) times a cluster's squared spread, but at most `lift_log_max`, is added to its
    score; without it the scores stay those of the centroids.
    Returns out (group, dv), lse (group,), estimated_lse (group,).
    """
    cdef Head head = borrow(index)
    cdef int64_t group = logits.shape[0], count = read.shape[0], c = head.clusters * estimate
    cdef float[:, ::1] out = np.zeros((group, head.dv), np.float32)
    cdef float[:, ::1] lse = np.empty((2, group), np.float32)
    cdef float[::1] floats = np.empty(2 * c + head.dv + group * (1 + count + c) + 1, np.float32)
    cdef double[::1] doubles = np.empty(c + 2 * group, np.float64)
    cdef float *left = &floats[0]
    cdef float *scores = left + c
    cdef float *row = scores + c
    cdef Weights weights
    weights.peaks = row + head.dv
    weights.keys = weights.peaks + group
    weights.clusters = weights.keys + group * count
    weights.totals = &doubles[c]
    weights.rests = weights.totals + group
    cdef const uint32_t *ids = &read[0] if count > 0 else NULL
    cdef const float *mine = &logits[0, 0] if count > 0 else NULL
    cdef const float *cluster_logits = &centroid_logits[0, 0] if c > 0 else NULL
    cdef const float *lifts = &lift[0] if lift is not None else NULL
    with nogil:
        if estimate:
            _left(&head, ids, count, left)
        _combine(&head, group, ids, count, mine, cluster_logits, left if estimate else NULL,
                 lifts, lift_log_max, &doubles[0], scores, &weights, row, &out[0, 0],
                 &lse[0, 0], &lse[1, 0])
    lses = np.asarray(lse)
    return np.asarray(out), lses[0], lses[1]


def attend_exact(object index, const float[:, ::1] queries, float scaling):
    """Attend to every key of one KV head: queries (rows, d) to out (rows, dv), lse (rows,)."""
    cdef Head head = borrow(index)
    cdef int64_t rows = queries.shape[0], r, j
    cdef float[:, ::1] out = np.zeros((rows, head.dv), np.float32)
    cdef float[::1] peak = np.full(rows, -np.inf, np.float32)
    cdef double[::1] total = np.zeros(rows, np.float64)
    cdef float[::1] scratch = np.empty(OB_BLOCK * (2 * head.d + head.dv + 2), np.float32)
    with nogil:
        ob_exact(&queries[0, 0], rows, head.keys, head.values, head.dtype, head.d, head.dv, 0,
                 head.m, scaling, &scratch[0], &peak[0], &total[0], &out[0, 0])
        for r in range(rows):
            for j in range(head.dv):
                out[r, j] = <float>(out[r, j] / total[r])
            peak[r] += <float>log(total[r])
    return np.asarray(out), np.asarray(peak)
