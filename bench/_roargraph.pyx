"""RoarGraph as its makers released it (github.com/matchyc/RoarGraph), one thread, inner product.

Owns the projection of training queries, the connectivity of all keys, and the search. Keys and
queries are float32. Where the released code keeps a vector of vectors the graph lies here in one
array, and a search fetches the rows of all fresh neighbours ahead: both in its favour. Ids are
trusted.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy

from openbook.indexstore._candidates cimport insert, key_of, ordered, pack

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    void ob_prefetch(const void *address)


cdef struct Lists:
    # The neighbours of every key, at most `room`.
    uint32_t *ids  # (n, room)
    int32_t *sizes  # (n,)
    int64_t room


cdef struct Maker:
    # A build: the keys, what it may keep, and its scratch.
    const float *keys  # (n, d)
    int64_t n, d, links
    int64_t *packed  # candidates of a prune
    uint32_t *kept  # (3 * links,)


cdef inline float _dot(const float *a, const float *b, int64_t d) noexcept nogil:
    cdef float total = 0
    cdef int64_t j
    for j in range(d):
        total += a[j] * b[j]
    return total


cdef inline float _score_of(int64_t packed) noexcept nogil:
    # The inner product in a packed candidate: `ordered` undone.
    cdef int32_t bits = <int32_t>(packed >> 32)
    cdef float value
    if bits < 0:
        bits = bits ^ 0x7fffffff
    memcpy(&value, &bits, sizeof(value))
    return value


cdef int _falling(const void *a, const void *b) noexcept nogil:
    cdef int64_t left = (<const int64_t *>a)[0], right = (<const int64_t *>b)[0]
    return (left < right) - (left > right)


cdef inline bint _holds(const uint32_t *ids, int64_t size, uint32_t key) noexcept nogil:
    cdef int64_t i
    for i in range(size):
        if ids[i] == key:
            return True
    return False


cdef void _rank(Maker *maker, uint32_t pivot, const uint32_t *ids, int64_t count) noexcept nogil:
    # The candidates of a pivot, packed, nearest first.
    cdef const float *row = maker.keys + <int64_t>pivot * maker.d
    cdef int64_t i
    for i in range(count):
        maker.packed[i] = pack(
            ordered(_dot(row, maker.keys + <int64_t>ids[i] * maker.d, maker.d)), ids[i])
    qsort(maker.packed, count, sizeof(int64_t), _falling)


cdef int64_t _prune(Maker *maker, int64_t first, int64_t count) noexcept nogil:
    # Keep a candidate iff no kept one is nearer to it than the pivot is; at most `links` of them.
    cdef int64_t i, r, size = 0
    cdef uint32_t key
    cdef float score
    cdef const float *row
    cdef bint is_kept
    for i in range(first, count):
        if size == maker.links:
            break
        key, score = key_of(maker.packed[i]), _score_of(maker.packed[i])
        row = maker.keys + <int64_t>key * maker.d
        is_kept = True
        for r in range(size):
            if _dot(row, maker.keys + <int64_t>maker.kept[r] * maker.d, maker.d) > score:
                is_kept = False
                break
        if is_kept:
            maker.kept[size] = key
            size += 1
    return size


cdef int64_t _fill(Maker *maker, int64_t size, int64_t count) noexcept nogil:
    # Up to `links`, the nearest of the candidates that were not kept.
    cdef int64_t i
    for i in range(count):
        if size == maker.links:
            break
        if not _holds(maker.kept, size, key_of(maker.packed[i])):
            maker.kept[size] = key_of(maker.packed[i])
            size += 1
    return size


cdef inline void _assign(Maker *maker, Lists *lists, uint32_t key, int64_t size) noexcept nogil:
    memcpy(lists.ids + <int64_t>key * lists.room, maker.kept, size * sizeof(uint32_t))
    lists.sizes[key] = <int32_t>size


cdef void _add_reverse(Maker *maker, Lists *lists, uint32_t key, bint fills) noexcept nogil:
    # Every neighbour of a key learns of it; one whose list is full chooses again.
    cdef uint32_t *mine = lists.ids + <int64_t>key * lists.room
    cdef uint32_t *theirs
    cdef uint32_t pool[1024]
    cdef uint32_t other
    cdef int64_t i, size, kept
    for i in range(lists.sizes[key]):
        other = mine[i]
        theirs, size = lists.ids + <int64_t>other * lists.room, lists.sizes[other]
        if _holds(theirs, size, key):
            continue
        if size < lists.room:
            theirs[size] = key
            lists.sizes[other] += 1
            continue
        memcpy(pool, theirs, size * sizeof(uint32_t))
        pool[size] = key
        _rank(maker, other, pool, size + 1)
        kept = _prune(maker, 0, size + 1)
        _assign(maker, lists, other, _fill(maker, kept, size + 1) if fills else kept)


cdef void _project(Maker *maker, Lists *lists, const uint32_t *neighbours, int64_t queries,
                   int64_t width) noexcept nogil:
    # A query links its best key to the others it wants; a later one of the same key overwrites.
    cdef int64_t s, i
    cdef uint32_t pivot
    for s in range(queries):
        pivot = neighbours[s * width]
        _rank(maker, pivot, neighbours + s * width + 1, width - 1)
        _assign(maker, lists, pivot, _fill(maker, _prune(maker, 0, width - 1), width - 1))
        _add_reverse(maker, lists, pivot, True)
    for i in range(maker.n):
        _add_reverse(maker, lists, <uint32_t>i, True)


cdef int64_t _beam(Maker *maker, Lists *lists, uint32_t entry, uint32_t target, int64_t beam,
                   int64_t *row, uint32_t *stamps, uint32_t *expanded) noexcept nogil:
    # Search the graph for a key; return how many were expanded, in their order.
    cdef const float *query = maker.keys + <int64_t>target * maker.d
    cdef int64_t size = 0, cursor = 0, count = 0, i
    cdef uint32_t key, near
    cdef const uint32_t *ids
    stamps[target] = target + 1  # a stamp of zero is nobody's
    stamps[entry] = target + 1
    insert(pack(ordered(_dot(query, maker.keys + <int64_t>entry * maker.d, maker.d)), entry), row,
           &size, &cursor, beam)
    while True:
        while cursor < size and row[cursor] & 1:
            cursor += 1
        if cursor >= size:
            return count
        row[cursor] |= 1
        key = key_of(row[cursor])
        if key != target:
            expanded[count] = key
            count += 1
        ids = lists.ids + <int64_t>key * lists.room
        for i in range(lists.sizes[key]):
            near = ids[i]
            if stamps[near] != target + 1:
                stamps[near] = target + 1
                insert(pack(ordered(_dot(query, maker.keys + <int64_t>near * maker.d, maker.d)),
                            near), row, &size, &cursor, beam)


cdef int64_t _prune_beyond(Maker *maker, Lists *projected, uint32_t key,
                           int64_t count) noexcept nogil:
    # Prune ranked candidates, starting from the first that the projection did not link.
    cdef const uint32_t *known = projected.ids + <int64_t>key * projected.room
    cdef int64_t first = 0
    while first < count and _holds(known, projected.sizes[key], key_of(maker.packed[first])):
        first += 1
    return _prune(maker, first, count)


cdef void _connect(Maker *maker, Lists *projected, Lists *supply, uint32_t entry, int64_t beam,
                   int64_t *row, uint32_t *stamps, uint32_t *expanded) noexcept nogil:
    # Every key is searched for, and linked to what was expanded on the way; then both ways.
    cdef int64_t i, count
    cdef uint32_t key
    for i in range(maker.n):
        _assign_list(projected, supply, <uint32_t>i)
    for i in range(maker.n):
        key = <uint32_t>i
        count = _beam(maker, supply, entry, key, beam, row, stamps, expanded)
        _rank(maker, key, expanded, count)
        _assign(maker, supply, key, _prune_beyond(maker, projected, key, count))
        _add_reverse(maker, supply, key, False)
    for i in range(maker.n):
        key, count = <uint32_t>i, supply.sizes[i]
        if count > maker.links:
            _rank(maker, key, supply.ids + i * supply.room, count)
            _assign(maker, supply, key, _prune_beyond(maker, projected, key, count))


cdef inline void _assign_list(Lists *source, Lists *target, uint32_t key) noexcept nogil:
    memcpy(target.ids + <int64_t>key * target.room, source.ids + <int64_t>key * source.room,
           source.sizes[key] * sizeof(uint32_t))
    target.sizes[key] = source.sizes[key]


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
            if not _holds(known, projected.sizes[i], more[j]):
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
    cdef int64_t n = keys.shape[0], s = neighbours.shape[0], width = neighbours.shape[1]
    cdef int64_t scratch = max(width, n, 2 * links) + 1
    assert 0 < links <= 500, "a full list and one more fit the scratch of _add_reverse"
    cdef uint32_t[:, ::1] near = np.empty((n, links), np.uint32)
    cdef uint32_t[:, ::1] more = np.empty((n, 2 * links), np.uint32)
    cdef int32_t[:, ::1] sizes = np.zeros((2, n), np.int32)
    cdef int64_t[:, ::1] packed = np.empty((2, max(scratch, beam + 1)), np.int64)
    cdef uint32_t[:, ::1] numbers = np.zeros((3, max(scratch, 3 * links)), np.uint32)
    cdef int64_t[::1] starts = np.empty(n + 1, np.int64)
    cdef uint32_t[::1] joined = np.empty(3 * links * n + 1, np.uint32)
    cdef Lists projected = Lists(&near[0, 0], &sizes[0, 0], links)
    cdef Lists supply = Lists(&more[0, 0], &sizes[1, 0], 2 * links)
    cdef Maker maker = Maker(&keys[0, 0], n, keys.shape[1], links, &packed[0, 0], &numbers[0, 0])
    cdef int64_t edges
    with nogil:
        _project(&maker, &projected, &neighbours[0, 0], s, width)
        _connect(&maker, &projected, &supply, entry, beam, &packed[1, 0], &numbers[1, 0],
                 &numbers[2, 0])
        edges = _join(&projected, &supply, n, &starts[0], &joined[0])
    return np.asarray(starts), np.asarray(joined)[:edges].copy()


cdef int64_t _walk(const float *query, const float *keys, int64_t d, const int64_t *starts,
                   const uint32_t *ids, uint32_t entry, int64_t beam, int64_t *row,
                   uint32_t *stamps, uint32_t stamp, uint32_t *fresh) noexcept nogil:
    # A sorted queue of `beam`, until nothing in it is unexpanded; return the keys scored.
    cdef int64_t size = 0, cursor = 0, scored = 1, i, j, kept
    cdef uint32_t key
    stamps[entry] = stamp
    insert(pack(ordered(_dot(query, keys + <int64_t>entry * d, d)), entry), row, &size, &cursor,
           beam)
    while True:
        while cursor < size and row[cursor] & 1:
            cursor += 1
        if cursor >= size:
            return scored
        row[cursor] |= 1
        key = key_of(row[cursor])
        for i in range(starts[key], starts[key + 1]):
            ob_prefetch(stamps + ids[i])
        kept = 0
        for i in range(starts[key], starts[key + 1]):
            if stamps[ids[i]] != stamp:
                stamps[ids[i]] = stamp
                for j in range(0, d, 16):
                    ob_prefetch(keys + <int64_t>ids[i] * d + j)
                fresh[kept] = ids[i]
                kept += 1
        scored += kept
        for i in range(kept):
            insert(pack(ordered(_dot(query, keys + <int64_t>fresh[i] * d, d)), fresh[i]), row,
                   &size, &cursor, beam)


def search(const float[:, ::1] keys, const int64_t[::1] starts, const uint32_t[::1] ids,
           uint32_t entry, const float[:, ::1] queries, int64_t wanted, int64_t beam,
           uint32_t[::1] stamps, uint32_t stamp):
    """Return the best ids int64 (group, wanted) of queries (group, d), -1 where none; keys scored.

    `stamps` (n + 1,) remembers between calls who was visited: give each call a `stamp` higher by
    group than the last one's.
    """
    cdef int64_t group = queries.shape[0], d = keys.shape[1], g, i, scored = 0
    cdef int64_t[:, ::1] found = np.full((group, wanted), -1, np.int64)
    cdef int64_t[::1] row = np.empty(beam + 1, np.int64)
    cdef uint32_t[::1] fresh = np.empty(2048, np.uint32)
    with nogil:
        for g in range(group):
            for i in range(min(beam, wanted)):
                row[i] = 0
            scored += _walk(&queries[g, 0], &keys[0, 0], d, &starts[0], &ids[0], entry, beam,
                            &row[0], &stamps[0], stamp + <uint32_t>g, &fresh[0])
            for i in range(min(beam, wanted)):
                if row[i] & 1:
                    found[g, i] = key_of(row[i])
    return np.asarray(found), scored
