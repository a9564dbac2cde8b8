"""Attend to keys of one KV head: those a search found with the estimate of the rest, or all.

head.HeadIndex has checked every array; the loops release the GIL, create no Python objects and
never raise. Their NumPy twins are reference.combine and reference.softmax_partial.
"""

cimport numpy as cnp
from libc.math cimport INFINITY, log
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from openbook.indexstore._head cimport Head, borrow

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int OB_BLOCK
    double ob_weights(const float *logits, int64_t count, float peak, float *weights)
    void ob_add_values(const float *weights, int64_t group, const void *values, int dtype,
                       int64_t d, const uint32_t *ids, int64_t count, int64_t stride, float *row,
                       float *out)
    void ob_add_rows(const float *weights, int64_t group, const float *rows, int64_t d,
                     int64_t count, int64_t stride, float *out)
    void ob_exact(const float *queries, int64_t rows, const void *keys, const void *values,
                  int dtype, int64_t d, int64_t dv, int64_t first, int64_t last, float scaling,
                  float *scratch, float *peak, double *total, float *out)


cdef int64_t _rest(Head *head, const uint32_t *read, int64_t read_count, float *counts,
                   float *sums, float *row) noexcept nogil:
    # What each cluster holds once the keys read are taken out; exactly nothing when all were.
    cdef int64_t c, i, j
    cdef float minus_one = -1
    for c in range(head.clusters):
        counts[c] = <float>head.counts[c]
    memcpy(sums, head.value_sums, head.clusters * head.dv * sizeof(float))
    for i in range(read_count):
        c = head.cluster_of[read[i]]
        counts[c] -= 1
        ob_add_values(&minus_one, 1, head.values, head.dtype, head.dv, read + i, 1, 1, row,
                      sums + c * head.dv)
    for c in range(head.clusters):
        if counts[c] == 0:
            for j in range(head.dv):
                sums[c * head.dv + j] = 0
    return 0


cdef void _scores(Head *head, const uint32_t *read, int64_t read_count, const float *logits,
                  const float *centroid_logits, const float *counts, const float *lift,
                  float lift_log_max, double *sums, float *scores) noexcept nogil:
    # The score of each cluster for one query head; a spent one lies at -inf, whatever its mean.
    # With a lift: the mean of the keys that are left, and what their spread adds to its weight.
    cdef int64_t c, i
    cdef float more
    if lift != NULL:
        for c in range(head.clusters):
            sums[c] = <double>head.counts[c] * <double>centroid_logits[c]
        for i in range(read_count):
            sums[head.cluster_of[read[i]]] -= logits[i]
    for c in range(head.clusters):
        if not counts[c] > 0:
            scores[c] = -INFINITY
        elif lift == NULL:
            scores[c] = centroid_logits[c]
        else:
            more = lift[0] * head.spreads[c] * head.spreads[c]
            scores[c] = <float>(sums[c] / counts[c]) + (
                more if more < lift_log_max else lift_log_max)


cdef float _peak(const float *logits, int64_t count, float start) noexcept nogil:
    # The largest logit.
    cdef int64_t i
    for i in range(count):
        if logits[i] > start:
            start = logits[i]
    return start


cdef void _combine(Head *head, int64_t group, const uint32_t *read, int64_t read_count,
                   const float *logits, const float *centroid_logits, const float *counts,
                   const float *sums, const float *lift, float lift_log_max, double *scratch,
                   float *scores, float *weights, float *row, float *out, float *lse,
                   float *estimated_lse) noexcept nogil:
    # One partial under one common maximum: the keys read, then the clusters of the rest.
    cdef int64_t g, c, clusters = head.clusters if counts != NULL else 0
    cdef float peak
    cdef double total, rest
    for g in range(group):
        if clusters > 0:
            _scores(head, read, read_count, logits + g * read_count,
                    centroid_logits + g * clusters, counts, lift + g if lift != NULL else NULL,
                    lift_log_max, scratch, scores)
        peak = _peak(logits + g * read_count, read_count, -INFINITY)
        peak = _peak(scores, clusters, peak)
        lse[g] = estimated_lse[g] = -INFINITY
        if peak == -INFINITY:
            continue
        total = ob_weights(logits + g * read_count, read_count, peak, weights)
        ob_add_values(weights, 1, head.values, head.dtype, head.dv, read, read_count, read_count,
                      row, out + g * head.dv)
        rest = 0
        if clusters > 0:
            ob_weights(scores, clusters, peak, weights)
            for c in range(clusters):
                rest += <double>(weights[c] * counts[c])
            ob_add_rows(weights, 1, sums, head.dv, clusters, clusters, out + g * head.dv)
        total += rest
        for c in range(head.dv):
            out[g * head.dv + c] = <float>(out[g * head.dv + c] / total)
        lse[g] = peak + <float>log(total)
        if rest > 0:
            estimated_lse[g] = peak + <float>log(rest)


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
    cdef int64_t most = max(count, c)
    cdef float[:, ::1] out = np.zeros((group, head.dv), np.float32)
    cdef float[:, ::1] lse = np.empty((2, group), np.float32)
    cdef float[::1] rest = np.empty(c * (1 + head.dv) + 1, np.float32)
    cdef float[::1] weights = np.empty(most + head.dv, np.float32)
    cdef float[::1] scores = np.empty(c + 1, np.float32)
    cdef double[::1] scratch = np.empty(c + 1, np.float64)
    cdef float *row = &weights[most]
    cdef const uint32_t *ids = &read[0] if count > 0 else NULL
    cdef const float *mine = &logits[0, 0] if count > 0 else NULL
    cdef const float *cluster_logits = &centroid_logits[0, 0] if c > 0 else NULL
    cdef const float *lifts = &lift[0] if lift is not None else NULL
    with nogil:
        if estimate:
            _rest(&head, ids, count, &rest[0], &rest[c], row)
        _combine(&head, group, ids, count, mine, cluster_logits, &rest[0] if estimate else NULL,
                 &rest[c], lifts, lift_log_max, &scratch[0], &scores[0], &weights[0], row,
                 &out[0, 0], &lse[0, 0], &lse[1, 0])
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
