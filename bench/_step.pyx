"""What a rival's step needs besides its search, so that it is not slow for Python's sake.

Owns the union of what a group found, exact scores of it and of centroids, and the choice of whole
clusters; all with openbook's own kernels. Arrays are checked by their types, ids are trusted.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from openbook.indexstore._candidates cimport key_of, ordered, pack
from openbook.indexstore._head cimport Head, borrow

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int ob_best_level()
    int64_t ob_lowest_bit(uint64_t word)
    void ob_logits(int level, const float *queries, int64_t group, const void *keys, int dtype,
                   int64_t d, const uint32_t *ids, int64_t count, float scaling, float *row,
                   float *logits, int64_t stride)
    void ob_keep_largest(int64_t *numbers, int64_t count, int64_t keep)

cdef int LEVEL = ob_best_level()


cdef int64_t _drain(uint8_t *marked, int64_t bytes_, uint32_t *ids) noexcept nogil:
    # The marked ids in rising order; whole words are read.
    cdef int64_t byte, count = 0
    cdef uint64_t word
    for byte in range(0, bytes_, 8):
        memcpy(&word, marked + byte, 8)
        while word:
            ids[count] = <uint32_t>(byte * 8 + ob_lowest_bit(word))
            count += 1
            word &= word - 1
    return count


def union(const int64_t[:, ::1] ids, int64_t m):
    """Return the distinct ids of all rows (group, w), rising, uint32; a negative one is none."""
    cdef int64_t group = ids.shape[0], width = ids.shape[1], bytes_ = (m + 7) // 8, g, i, count
    cdef uint8_t[::1] marked = np.zeros(bytes_ + 8, np.uint8)
    cdef uint32_t[::1] read = np.empty(group * width + 1, np.uint32)
    with nogil:
        for g in range(group):
            for i in range(width):
                if ids[g, i] >= 0:
                    marked[ids[g, i] >> 3] |= <uint8_t>(1 << (ids[g, i] & 7))
        count = _drain(&marked[0], bytes_, &read[0])
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
    cdef int64_t group = logits.shape[0], clusters = logits.shape[1], g, c, i, size, count = 0
    cdef int64_t keep = min(wanted, clusters), room = min(clusters, 2 * keep + 64)
    cdef int64_t bytes_ = (clusters + 7) // 8, chosen
    cdef int32_t bar
    cdef int64_t[::1] row = np.empty(room + 1, np.int64)
    cdef uint8_t[::1] marked = np.zeros(bytes_ + 8, np.uint8)
    cdef uint32_t[::1] best = np.empty(group * keep + 1, np.uint32)
    with nogil:
        for g in range(group):
            size, bar = 0, -2147483647
            for c in range(clusters):
                if ordered(logits[g, c]) < bar:
                    continue
                if size == room:
                    ob_keep_largest(&row[0], size, keep)
                    size = keep
                    bar = <int32_t>(row[0] >> 32)
                    for i in range(1, keep):
                        bar = min(bar, <int32_t>(row[i] >> 32))
                row[size] = pack(ordered(logits[g, c]), <uint32_t>c)
                size += 1
            if size > keep:
                ob_keep_largest(&row[0], size, keep)
            for i in range(keep):
                c = key_of(row[i])
                marked[c >> 3] |= <uint8_t>(1 << (c & 7))
        chosen = _drain(&marked[0], bytes_, &best[0])
        for i in range(chosen):
            count += starts[best[i] + 1] - starts[best[i]]
    cdef uint32_t[::1] read = np.empty(count + 1, np.uint32)
    count = 0
    for i in range(chosen):
        for c in range(starts[best[i]], starts[best[i] + 1]):
            read[count] = <uint32_t>c
            count += 1
    return np.asarray(read)[:count]
