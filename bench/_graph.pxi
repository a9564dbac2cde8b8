"""What the graphs of rivals do alike: walk greedily, prune, link both ways.

Included by each of them, so that its own nearness is compiled into these loops. It must define

    float nearness(const float *a, const float *b, int64_t d)   larger is nearer
    bint occludes(float near, float score, float alpha)         whether a candidate of that score
        is dropped because it is as near as `near` to one already kept

Keys are rows of float32. A candidate is a score and an id in one number (_candidates.pxd). Ids are
trusted.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy

from openbook.indexstore._candidates cimport insert, key_of, ordered, pack

cdef extern from "kernels.h" nogil:
    void ob_prefetch(const void *address)

cdef enum:
    NEIGHBOURS_MAX = 2048  # of one key, in a walk


cdef struct Lists:
    # The neighbours of every key, at most `room`.
    uint32_t *ids  # (n, room)
    int32_t *sizes  # (n,)
    int64_t room


cdef struct Maker:
    # A build: the keys, what a prune may keep, and its scratch.
    const float *keys  # (n, d)
    int64_t n, d, links
    float alpha
    int64_t *packed  # candidates of a pivot
    uint32_t *kept  # (links,)


cdef struct Walk:
    # The best `beam` keys met, best first; bit 0 says that one was expanded.
    const float *keys  # (n, d)
    int64_t d
    const float *query  # (d,)
    int64_t *row  # (beam + 1,)
    int64_t beam, size, cursor
    uint32_t *stamps  # (n,) a key with this walk's stamp was met
    uint32_t stamp


cdef inline int64_t candidate(const float *pivot, const float *keys, int64_t d,
                              uint32_t key) noexcept nogil:
    return pack(ordered(nearness(pivot, keys + <int64_t>key * d, d)), key)


cdef inline float score_of(int64_t packed) noexcept nogil:
    # The nearness in a candidate: `ordered` undone.
    cdef int32_t bits = <int32_t>(packed >> 32)
    cdef float value
    if bits < 0:
        bits = bits ^ 0x7fffffff
    memcpy(&value, &bits, sizeof(value))
    return value


cdef inline bint holds(const uint32_t *ids, int64_t size, uint32_t key) noexcept nogil:
    cdef int64_t i
    for i in range(size):
        if ids[i] == key:
            return True
    return False


cdef inline void start(Walk *walk, uint32_t entry) noexcept nogil:
    walk.size, walk.cursor = 0, 0
    walk.stamps[entry] = walk.stamp
    insert(candidate(walk.query, walk.keys, walk.d, entry), walk.row, &walk.size, &walk.cursor,
           walk.beam)


cdef inline bint expand(Walk *walk, int64_t *packed) noexcept nogil:
    # Mark the best candidate that was not expanded; false where all were.
    while walk.cursor < walk.size and walk.row[walk.cursor] & 1:
        walk.cursor += 1
    if walk.cursor >= walk.size:
        return False
    packed[0] = walk.row[walk.cursor]
    walk.row[walk.cursor] |= 1
    return True


cdef inline int64_t meet(Walk *walk, const uint32_t *ids, int64_t count) noexcept nogil:
    # Score those of some neighbours that were not met before; return how many.
    cdef uint32_t fresh[NEIGHBOURS_MAX]
    cdef const float *keys = walk.keys  # copied: what is written below cannot change them
    cdef const float *query = walk.query
    cdef uint32_t *stamps = walk.stamps
    cdef uint32_t stamp = walk.stamp
    cdef int64_t d = walk.d, size = walk.size, cursor = walk.cursor, i, j, kept = 0
    for i in range(count):
        ob_prefetch(stamps + ids[i])
    for i in range(count):
        if stamps[ids[i]] != stamp:
            stamps[ids[i]] = stamp
            for j in range(0, d, 16):
                ob_prefetch(keys + <int64_t>ids[i] * d + j)
            fresh[kept] = ids[i]
            kept += 1
    for i in range(kept):
        insert(candidate(query, keys, d, fresh[i]), walk.row, &size, &cursor, walk.beam)
    walk.size, walk.cursor = size, cursor
    return kept


cdef int64_t visit(Maker *maker, Lists *lists, Walk *walk, uint32_t entry,
                   uint32_t pivot) noexcept nogil:
    # Walk to a key: all others expanded on the way are its candidates. Returns how many.
    cdef int64_t packed, count = 0
    cdef uint32_t key
    walk.query = maker.keys + <int64_t>pivot * maker.d
    start(walk, entry)
    while expand(walk, &packed):
        key = key_of(packed)
        if key != pivot:
            maker.packed[count] = packed
            count += 1
        meet(walk, lists.ids + <int64_t>key * lists.room, lists.sizes[key])
    return count


cdef int64_t append(Maker *maker, uint32_t pivot, const uint32_t *ids, int64_t count,
                    int64_t size) noexcept nogil:
    # More candidates of a pivot, after the first `size`. Returns how many there are.
    cdef const float *row = maker.keys + <int64_t>pivot * maker.d
    cdef int64_t i
    for i in range(count):
        maker.packed[size + i] = candidate(row, maker.keys, maker.d, ids[i])
    return size + count


cdef int falling(const void *a, const void *b) noexcept nogil:
    cdef int64_t left = (<const int64_t *>a)[0], right = (<const int64_t *>b)[0]
    return (left < right) - (left > right)


cdef inline void rank(Maker *maker, int64_t count) noexcept nogil:
    # Nearest first.
    qsort(maker.packed, count, sizeof(int64_t), falling)


cdef int64_t prune(Maker *maker, int64_t first, int64_t count) noexcept nogil:
    # Keep a ranked candidate iff no kept one occludes it; at most `links`. Returns how many.
    cdef int64_t i, r, size = 0
    cdef uint32_t key
    cdef float score
    cdef const float *row
    cdef bint is_kept
    for i in range(first, count):
        if size == maker.links:
            break
        key, score = key_of(maker.packed[i]), score_of(maker.packed[i])
        row = maker.keys + <int64_t>key * maker.d
        is_kept = True
        for r in range(size):
            if occludes(nearness(row, maker.keys + <int64_t>maker.kept[r] * maker.d, maker.d),
                        score, maker.alpha):
                is_kept = False
                break
        if is_kept:
            maker.kept[size] = key
            size += 1
    return size


cdef int64_t fill(Maker *maker, int64_t size, int64_t count) noexcept nogil:
    # Up to `links`, the nearest of the candidates that were not kept.
    cdef int64_t i
    for i in range(count):
        if size == maker.links:
            break
        if not holds(maker.kept, size, key_of(maker.packed[i])):
            maker.kept[size] = key_of(maker.packed[i])
            size += 1
    return size


cdef inline void assign(Lists *lists, uint32_t key, const uint32_t *ids,
                        int64_t size) noexcept nogil:
    memcpy(lists.ids + <int64_t>key * lists.room, ids, size * sizeof(uint32_t))
    lists.sizes[key] = <int32_t>size


cdef void add_reverse(Maker *maker, Lists *lists, uint32_t key, bint fills) noexcept nogil:
    # Every neighbour of a key learns of it; one whose list is full chooses again.
    cdef const uint32_t *mine = lists.ids + <int64_t>key * lists.room
    cdef uint32_t *theirs
    cdef uint32_t other
    cdef int64_t i, size, kept
    for i in range(lists.sizes[key]):
        other = mine[i]
        theirs, size = lists.ids + <int64_t>other * lists.room, lists.sizes[other]
        if holds(theirs, size, key):
            continue
        if size < lists.room:
            theirs[size] = key
            lists.sizes[other] += 1
            continue
        size = append(maker, other, &key, 1, append(maker, other, theirs, size, 0))
        rank(maker, size)
        kept = prune(maker, 0, size)
        assign(lists, other, maker.kept, fill(maker, kept, size) if fills else kept)
