"""Attend to keys of one KV head: those a search found with the estimate of the rest, or all.

head.HeadIndex has checked every array; the loops release the GIL, create no Python objects and
never raise. Their NumPy twins are reference.combine and reference.softmax_partial.
"""

cimport numpy as cnp
from libc.math cimport log
from libc.stdint cimport int64_t, uint32_t

from openbook.indexstore._estimate cimport Weights, combine, place
from openbook.indexstore._head cimport Head, borrow

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int OB_BLOCK
    int ob_best_level()
    void ob_exact(const float *queries, int64_t rows, const void *keys, const void *values,
                  int dtype, int64_t d, int64_t dv, int64_t first, int64_t last, float scaling,
                  float *scratch, float *peak, double *total, float *out)

cdef int LEVEL = ob_best_level()


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
    cdef Weights weights
    cdef char *at = NULL
    place(&head, group, count, c, &at, &weights)
    cdef object block = np.empty(<size_t>at, np.uint8)
    at = cnp.PyArray_BYTES(block)
    place(&head, group, count, c, &at, &weights)
    cdef const uint32_t *ids = &read[0] if count > 0 else NULL
    cdef const float *mine = &logits[0, 0] if count > 0 else NULL
    cdef const float *cluster_logits = &centroid_logits[0, 0] if c > 0 else NULL
    cdef const float *lifts = &lift[0] if lift is not None else NULL
    with nogil:
        combine(LEVEL, &head, group, ids, count, mine, cluster_logits, estimate, lifts,
                lift_log_max, &weights, &out[0, 0], &lse[0, 0], &lse[1, 0])
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
