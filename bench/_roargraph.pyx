"""RoarGraph as its makers released it (github.com/matchyc/RoarGraph), one thread, inner product.

Owns the projection of training queries, the connectivity of all keys, and the search. Keys and
queries are float32. Where the released code keeps a vector of vectors the graph lies here in one
array, and a walk fetches the rows of all fresh neighbours ahead: both in its favour. Ids are
trusted.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

import numpy as np

include "_graph.pxi"

cnp.import_array()


cdef inline float nearness(const float *a, const float *b, int64_t d) noexcept nogil:
    cdef float total = 0
    cdef int64_t j
    for j in range(d):
        total += a[j] * b[j]
    return total


cdef inline bint occludes(float near, float score, float alpha) noexcept nogil:
    return near > score


cdef void _project(Maker *maker, Lists *lists, const uint32_t *neighbours, int64_t queries,
                   int64_t width) noexcept nogil:
    # A query links its best key to the others it wants; a later one of the same key overwrites.
    cdef int64_t s, i, count
    cdef uint32_t pivot
    for s in range(queries):
        pivot = neighbours[s * width]
        count = append(maker, pivot, neighbours + s * width + 1, width - 1, 0)
        rank(maker, count)
        assign(lists, pivot, maker.kept, fill(maker, prune(maker, 0, count), count))
        add_reverse(maker, lists, pivot, True)
    for i in range(maker.n):
        add_reverse(maker, lists, <uint32_t>i, True)


cdef int64_t _prune_beyond(Maker *maker, Lists *projected, uint32_t key,
                           int64_t count) noexcept nogil:
    # Rank and prune candidates, starting from the first that the projection did not link.
    cdef const uint32_t *known = projected.ids + <int64_t>key * projected.room
    cdef int64_t first = 0
    rank(maker, count)
    while first < count and holds(known, projected.sizes[key], key_of(maker.packed[first])):
        first += 1
    return prune(maker, first, count)


cdef void _connect(Maker *maker, Lists *projected, Lists *supply, Walk *walk,
                   uint32_t entry) noexcept nogil:
    # Every key is searched for, and linked to what was expanded on the way; then both ways.
    cdef int64_t i, count
    cdef uint32_t key
    for i in range(maker.n):
        assign(supply, <uint32_t>i, projected.ids + i * projected.room, projected.sizes[i])
    for i in range(maker.n):
        key = <uint32_t>i
        walk.stamp = key + 1  # a stamp of zero is nobody's
        walk.stamps[key] = walk.stamp  # not to be met
        count = visit(maker, supply, walk, entry, key)
        assign(supply, key, maker.kept, _prune_beyond(maker, projected, key, count))
        add_reverse(maker, supply, key, False)
    for i in range(maker.n):
        key, count = <uint32_t>i, supply.sizes[i]
        if count > maker.links:
            append(maker, key, supply.ids + i * supply.room, count, 0)
            assign(supply, key, maker.kept, _prune_beyond(maker, projected, key, count))


cdef int64_t _join(Lists *projected, Lists *supply, int64_t n, int64_t *starts,
                   uint32_t *out) noexcept nogil:
    # A key's final list: the projection's, then what the supply adds. Returns the edges.
    cdef int64_t i, j, at = 0
    cdef const uint32_t *known
    cdef const uint32_t *more
    for i in range(n):
        starts[i] = at
        known, more = projected.ids + i * projected.room, supply.ids + i * supply.room
        memcpy(out + at, known, projected.sizes[i] * sizeof(uint32_t))
        at += projected.sizes[i]
        for j in range(supply.sizes[i]):
            if not holds(known, projected.sizes[i], more[j]):
                out[at] = more[j]
                at += 1
    starts[n] = at
    return at


def build(const float[:, ::1] keys, const uint32_t[:, ::1] neighbours, int64_t links, int64_t beam,
          uint32_t entry):
    """Build the graph of keys (n, d) from the exact neighbours (s, N_q) of training queries.

    `links` is M and `beam` L. Returns starts int64 (n + 1,) and ids uint32 (edges,): key i's
    out-neighbours are ids[starts[i]:starts[i + 1]].
    """
    cdef int64_t n = keys.shape[0], d = keys.shape[1]
    cdef int64_t s = neighbours.shape[0], width = neighbours.shape[1]
    assert 0 < 3 * links <= NEIGHBOURS_MAX, "the joined lists can be walked"
    cdef uint32_t[:, ::1] near = np.empty((n, links), np.uint32)
    cdef uint32_t[:, ::1] more = np.empty((n, 2 * links), np.uint32)
    cdef int32_t[:, ::1] sizes = np.zeros((2, n), np.int32)
    cdef int64_t[::1] packed = np.empty(max(width, n, 2 * links) + 1, np.int64)
    cdef int64_t[::1] row = np.empty(beam + 1, np.int64)
    cdef uint32_t[::1] kept = np.empty(links, np.uint32), stamps = np.zeros(n, np.uint32)
    cdef int64_t[::1] starts = np.empty(n + 1, np.int64)
    cdef uint32_t[::1] joined = np.empty(3 * links * n + 1, np.uint32)
    cdef Lists projected = Lists(&near[0, 0], &sizes[0, 0], links)
    cdef Lists supply = Lists(&more[0, 0], &sizes[1, 0], 2 * links)
    cdef Maker maker = Maker(&keys[0, 0], n, d, links, 1, &packed[0], &kept[0])
    cdef Walk walk = Walk(&keys[0, 0], d, NULL, &row[0], beam, 0, 0, &stamps[0], 0)
    cdef int64_t edges
    with nogil:
        _project(&maker, &projected, &neighbours[0, 0], s, width)
        _connect(&maker, &projected, &supply, &walk, entry)
        edges = _join(&projected, &supply, n, &starts[0], &joined[0])
    return np.asarray(starts), np.asarray(joined)[:edges].copy()


cdef int64_t _search(Walk *walk, const int64_t *starts, const uint32_t *ids,
                     uint32_t entry) noexcept nogil:
    # Until nothing in the queue is unexpanded; return the keys scored.
    cdef int64_t packed, scored = 1
    cdef uint32_t key
    start(walk, entry)
    while expand(walk, &packed):
        key = key_of(packed)
        scored += meet(walk, ids + starts[key], starts[key + 1] - starts[key])
    return scored


def search(const float[:, ::1] keys, const int64_t[::1] starts, const uint32_t[::1] ids,
           uint32_t entry, const float[:, ::1] queries, int64_t wanted, int64_t beam,
           uint32_t[::1] stamps, uint32_t stamp):
    """Return the best ids int64 (group, wanted) of queries (group, d), -1 where none; keys scored.

    `stamps` (n,) remembers between calls who was met: give each call a `stamp` higher by group than
    the last one's.
    """
    cdef int64_t group = queries.shape[0], g, i, scored = 0
    cdef int64_t[:, ::1] found = np.full((group, wanted), -1, np.int64)
    cdef int64_t[::1] row = np.empty(beam + 1, np.int64)
    cdef Walk walk = Walk(&keys[0, 0], keys.shape[1], NULL, &row[0], beam, 0, 0, &stamps[0], stamp)
    with nogil:
        for g in range(group):
            walk.query = &queries[g, 0]
            scored += _search(&walk, &starts[0], &ids[0], entry)
            for i in range(min(walk.size, wanted)):
                found[g, i] = key_of(row[i])
            walk.stamp += 1
    return np.asarray(found), scored
