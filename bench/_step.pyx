"""What a rival's step needs besides its search, so that it is not slow for Python's sake.

Owns the union of what a group found, exact scores of it and of centroids, and the choice of whole
clusters; all with openbook's own kernels. Arrays are checked by their types, ids are trusted.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from openbook.indexstore._candidates cimport Found, keep_best, ordered, pack, union_of
from openbook.indexstore._head cimport Head, borrow

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int ob_best_level()
    void ob_logits(int level, const float *queries, int64_t group, const void *keys, int dtype,
                   int64_t d, const uint32_t *ids, int64_t count, float scaling, float *row,
                   float *logits, int64_t stride)

cdef int LEVEL = ob_best_level()
cdef enum:
    GROUP_MAX = 64  # query heads


def union(const int64_t[:, ::1] ids, int64_t m):
    """Return the distinct ids of all rows (group, w), rising, uint32; a negative one is none."""
    cdef int64_t group = ids.shape[0], width = ids.shape[1], bytes_ = (m + 7) // 8
    cdef int64_t g, i, size, count
    cdef int64_t sizes[GROUP_MAX]
    cdef int64_t[:, ::1] packed = np.empty((group, width + 1), np.int64)
    cdef uint8_t[::1] marked = np.empty(bytes_ + 8, np.uint8)
    cdef uint32_t[::1] read = np.empty(group * width + 1, np.uint32)
    cdef Found found = Found(width, width + 1, &packed[0, 0], &sizes[0], NULL, NULL, 0, NULL)
    assert group <= GROUP_MAX, "its sizes fit"
    with nogil:
        for g in range(group):
            size = 0
            for i in range(width):
                if ids[g, i] >= 0:
                    packed[g, size] = pack(0, <uint32_t>ids[g, i])
                    size += 1
            sizes[g] = size
        count = union_of(&found, group, &marked[0], bytes_, &read[0])
    return np.asarray(read)[:count]


def score(object index, const float[:, ::1] queries, const uint32_t[::1] read, float scaling):
    """Return the logits (group, r) of the keys `read` (r,) of a HeadIndex."""
    cdef Head head = borrow(index)
    cdef int64_t group = queries.shape[0], count = read.shape[0]
    cdef float[:, ::1] logits = np.empty((group, count), np.float32)
    cdef float[::1] row = np.empty(head.d, np.float32)
    if count:
        with nogil:
            ob_logits(LEVEL, &queries[0, 0], group, head.keys, head.dtype, head.d, &read[0], count,
                      scaling, &row[0], &logits[0, 0], count)
    return np.asarray(logits)


def score_centroids(object index, const float[:, ::1] queries, float scaling):
    """Return the logits (group, c) of the centroids of a HeadIndex."""
    cdef Head head = borrow(index)
    cdef int64_t group = queries.shape[0]
    cdef float[:, ::1] logits = np.empty((group, head.clusters), np.float32)
    cdef float[::1] row = np.empty(head.d, np.float32)
    with nogil:
        ob_logits(LEVEL, &queries[0, 0], group, head.centroids, head.centroid_dtype, head.d,
                  NULL, head.clusters, scaling, &row[0], &logits[0, 0], head.clusters)
    return np.asarray(logits)


def keys_of_best(const float[:, ::1] logits, const int64_t[::1] starts, int64_t wanted):
    """Return all keys (r,) uint32 of the best `wanted` clusters of every query head.

    `logits` (group, c) of the clusters; cluster j holds the keys starts[j] to starts[j + 1].
    """
    cdef int64_t group = logits.shape[0], clusters = logits.shape[1], bytes_ = (clusters + 7) // 8
    cdef int64_t keep = min(wanted, clusters), room = min(clusters, 2 * keep + 64)
    cdef int64_t g, c, i, size, chosen, count = 0
    cdef int32_t score
    cdef int64_t sizes[GROUP_MAX]
    cdef int32_t bars[GROUP_MAX]
    cdef int64_t[:, ::1] packed = np.empty((group + 1, room), np.int64)  # the last one is spare
    cdef uint8_t[::1] marked = np.empty(bytes_ + 8, np.uint8)
    cdef uint32_t[::1] best = np.empty(group * keep + 1, np.uint32)
    cdef Found found = Found(keep, room, &packed[0, 0], &sizes[0], NULL, &bars[0], 0,
                             &packed[group, 0])
    assert group <= GROUP_MAX, "its sizes fit"
    with nogil:
        for g in range(group):
            size, bars[g] = 0, -2147483647
            for c in range(clusters):
                score = ordered(logits[g, c])
                if score < bars[g]:
                    continue
                if size == room:
                    sizes[g] = size
                    keep_best(&found, g)
                    size = sizes[g]
                packed[g, size] = pack(score, <uint32_t>c)
                size += 1
            sizes[g] = size
            keep_best(&found, g)
        chosen = union_of(&found, group, &marked[0], bytes_, &best[0])
        for i in range(chosen):
            count += starts[best[i] + 1] - starts[best[i]]
    cdef uint32_t[::1] read = np.empty(count + 1, np.uint32)
    count = 0
    for i in range(chosen):
        for c in range(starts[best[i]], starts[best[i] + 1]):
            read[count] = <uint32_t>c
            count += 1
    return np.asarray(read)[:count]
