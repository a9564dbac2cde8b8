"""A Vamana graph whose queries are nodes while it is built, and are stitched out afterwards.

Owns the robust prune, insertion and the stitch (RobustVamana of OOD-DiskANN, arXiv 2211.12850).
Points are float32 and compared by squared L2: the caller has lengthened keys so that this ranks
like the inner product. Ids are trusted.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t

import numpy as np

include "_graph.pxi"

cnp.import_array()


cdef inline float nearness(const float *a, const float *b, int64_t d) noexcept nogil:
    # Squared L2, less than nothing.
    cdef float total = 0, gap
    cdef int64_t j
    for j in range(d):
        gap = a[j] - b[j]
        total += gap * gap
    return -total


cdef inline bint occludes(float near, float score, float alpha) noexcept nogil:
    # Of a candidate given twice the second is occluded by the first.
    return alpha * near >= score


cdef inline void _choose(Maker *maker, Lists *lists, uint32_t node, int64_t count) noexcept nogil:
    # The robust prune of `count` candidates.
    rank(maker, count)
    assign(lists, node, maker.kept, prune(maker, 0, count))


cdef void _insert_all(Maker *maker, Lists *lists, Walk *walk, uint32_t entry,
                      const uint32_t *order, const uint32_t *known, int64_t width,
                      int64_t keys) noexcept nogil:
    # One pass over all nodes; a query also has its exact neighbours for candidates.
    cdef int64_t i, count
    cdef uint32_t node
    for i in range(maker.n):
        node = order[i]
        walk.stamp += 1
        count = visit(maker, lists, walk, entry, node)
        count = append(maker, node, lists.ids + <int64_t>node * lists.room, lists.sizes[node],
                       count)
        if node >= keys:
            count = append(maker, node, known + (node - keys) * width, width, count)
        _choose(maker, lists, node, count)
        add_reverse(maker, lists, node, False)


cdef void _stitch(Maker *maker, Lists *lists, int64_t keys) noexcept nogil:
    # A key that led to queries may lead to what those led to; then it chooses again.
    cdef int64_t i, j, k, count
    cdef uint32_t near, beyond
    cdef bint led
    for i in range(keys):
        count, led = 0, False
        for j in range(lists.sizes[i]):
            near = lists.ids[i * lists.room + j]
            if near < keys:
                count = append(maker, <uint32_t>i, &near, 1, count)
                continue
            led = True
            for k in range(lists.sizes[near]):
                beyond = lists.ids[<int64_t>near * lists.room + k]
                if beyond < keys and beyond != i:
                    count = append(maker, <uint32_t>i, &beyond, 1, count)
        if led:
            _choose(maker, lists, <uint32_t>i, count)


def build(const float[:, ::1] points, const uint32_t[:, ::1] known, int64_t links, int64_t beam,
          float alpha):
    """Build the graph of the first points, the keys; the others are queries.

    `points` (keys + s, d); `known` (s, k): the exact neighbours of each query. Two passes, the
    first with an alpha of one. Returns the keys' lists uint32 (keys, links), their sizes int32
    (keys,) and the entry, the key nearest to the mean key.
    """
    cdef int64_t n = points.shape[0], d = points.shape[1]
    cdef int64_t queries = known.shape[0], width = known.shape[1]
    cdef int64_t keys = n - queries, room = n + links * (links + 1) + width
    assert 0 < links <= NEIGHBOURS_MAX, "a list can be walked"
    rows = np.asarray(points)[:keys]
    cdef uint32_t entry = ((rows - rows.mean(axis=0)) ** 2).sum(axis=1).argmin()
    cdef uint32_t[::1] order = np.random.default_rng(0).permutation(n).astype(np.uint32)
    cdef uint32_t[:, ::1] ids = np.zeros((n, links), np.uint32)
    cdef int32_t[::1] sizes = np.zeros(n, np.int32)
    cdef int64_t[::1] packed = np.empty(room, np.int64), row = np.empty(beam + 1, np.int64)
    cdef uint32_t[::1] kept = np.empty(links, np.uint32), stamps = np.zeros(n, np.uint32)
    cdef Lists lists = Lists(&ids[0, 0], &sizes[0], links)
    cdef Maker maker = Maker(&points[0, 0], n, d, links, 1, &packed[0], &kept[0])
    cdef Walk walk = Walk(&points[0, 0], d, NULL, &row[0], beam, 0, 0, &stamps[0], 0)
    cdef const uint32_t *near = &known[0, 0] if queries > 0 else NULL
    with nogil:
        _insert_all(&maker, &lists, &walk, entry, &order[0], near, width, keys)
        maker.alpha = alpha
        _insert_all(&maker, &lists, &walk, entry, &order[0], near, width, keys)
        _stitch(&maker, &lists, keys)
    return np.asarray(ids)[:keys], np.asarray(sizes)[:keys], int(entry)
