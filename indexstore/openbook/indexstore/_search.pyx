"""Find the best keys of one KV head: int8 scores over all of them, or along the graph.

Owns the candidate queues, the walk and the exact re-scoring of what it found. head.HeadIndex has
checked every array; the loops release the GIL, create no Python objects and never raise. Their
NumPy twin is reference.find.
"""

cimport numpy as cnp
from libc.math cimport INFINITY, fabs
from libc.stdint cimport int16_t, int8_t, int32_t, int64_t, uint8_t, uint32_t

from openbook.indexstore._candidates cimport (
    Found, choose, insert, keep_best, key_of, ordered, pack, shrink, union_of,
)
from openbook.indexstore._head cimport Head, borrow

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    float ob_dot(const float *a, const float *b, int64_t d)
    int ob_best_level()
    void ob_score_int8(int level, const int16_t *queries, int64_t group, const int8_t *keys,
                       int64_t d, const uint32_t *ids, int64_t count, int32_t *out, int64_t stride)
    int64_t ob_reaching(int level, const int32_t *scores, int64_t count, int32_t bar,
                        uint32_t *places)
    void ob_prefetch(const void *address)
    void ob_logits(int level, const float *queries, int64_t group, const void *keys, int dtype,
                   int64_t d, const uint32_t *ids, int64_t count, float scaling, float *row,
                   float *logits, int64_t stride)

cdef extern from "math.h" nogil:
    long lrintf(float value)

cdef int LEVEL = ob_best_level()

cdef enum:
    SCAN_BLOCK = 256  # keys scored at a time by the scan: their scores stay in L1
    SPARE = 4  # an int8 score is off by its rounding: one more candidate re-scored per 4 wanted


cdef void _quantise(const float *queries, int64_t group, Head *head, int16_t *out,
                    float *inverses) noexcept nogil:
    # Fold the key scales into the query, then round it to 16 bits; sums stay below 2^31.
    cdef int64_t limit = min(32767, 2147483647 // (128 * head.d))
    cdef int64_t g, j
    cdef float largest, inverse, value
    for g in range(group):
        largest = 0
        for j in range(head.d):
            value = <float>fabs(queries[g * head.d + j] * head.scale[j])
            if value > largest:
                largest = value
        inverse = <float>limit / largest if largest > 0 else 0
        inverses[g] = inverse
        for j in range(head.d):
            value = queries[g * head.d + j] * head.scale[j]
            out[g * head.d + j] = <int16_t>lrintf(value * inverse)


cdef void _offer(const int32_t *scores, int64_t stride, int64_t group, const uint32_t *ids,
                 int64_t count, uint32_t *places, Found *found) noexcept nogil:
    # Most keys fall short of the worst candidate: find those that do not, then insert them.
    cdef int64_t g, i, n
    cdef int64_t *row
    cdef int32_t bar
    cdef uint32_t place
    for g in range(group):
        row = found.packed + g * found.room
        bar = <int32_t>(row[found.capacity - 1] >> 32) if found.sizes[g] == found.capacity \
            else -2147483647
        n = ob_reaching(LEVEL, scores + g * stride, count, bar, places)
        for i in range(n):
            place = places[i]
            insert(pack(scores[g * stride + place], ids[place]), row, found.sizes + g,
                   found.cursors + g, found.capacity)


cdef void _collect(const int32_t *scores, int64_t first, int64_t count, uint32_t *places,
                   Found *found, int64_t g) noexcept nogil:
    # Gather what reaches the bar; whenever the room is full, keep the best and raise the bar.
    cdef int64_t i, n, size = found.sizes[g]
    cdef int64_t *row = found.packed + g * found.room
    n = ob_reaching(LEVEL, scores, count, found.bars[g], places)
    for i in range(n):
        if size == found.room:
            found.sizes[g] = size
            keep_best(found, g)
            size = found.sizes[g]
        row[size] = pack(scores[places[i]], <uint32_t>(first + places[i]))
        size += 1
    found.sizes[g] = size


cdef void _scan(const int16_t *queries, int64_t group, Head *head, int32_t *scores,
                uint32_t *places, Found *found) noexcept nogil:
    cdef int64_t first = 0, count, ahead, g, end = head.m * head.d
    for g in range(group):
        found.bars[g] = -2147483647  # lower than any score
    while first < head.m:
        count = min(SCAN_BLOCK, head.m - first)
        for ahead in range((first + count) * head.d, min((first + 2 * count) * head.d, end), 64):
            ob_prefetch(head.keys_int8 + ahead)
        ob_score_int8(LEVEL, queries, group, head.keys_int8 + first * head.d, head.d, NULL, count,
                      scores, SCAN_BLOCK)
        for g in range(group):
            _collect(scores + g * SCAN_BLOCK, first, count, places, found, g)
        first += count
    for g in range(group):
        keep_best(found, g)
    found.scored = head.m


cdef void _bound(const float *queries, int64_t group, Head *head, const float *centroid_logits,
                 float scaling, const float *inverses, float slack, float *bounds) noexcept nogil:
    # How good a key of a cluster may be, in the units of the int8 scores.
    cdef int64_t g, c
    cdef float base
    for g in range(group):
        base = ob_dot(queries + g * head.d, head.centre, head.d)
        for c in range(head.clusters):
            bounds[c * group + g] = (centroid_logits[g * head.clusters + c] / scaling - base
                                     + slack * head.spreads[c]) * inverses[g]


cdef int64_t _visit(const uint32_t *ids, int64_t count, uint8_t *visited, uint32_t *fresh,
                    int64_t group, const float *bounds, Head *head,
                    const float *thresholds) noexcept nogil:
    # Keep the ids not seen before whose cluster may hold a better key, and mark them.
    cdef int64_t i, g, kept = 0
    cdef uint32_t key
    cdef const float *bound
    for i in range(count):
        ob_prefetch(head.cluster_of + ids[i])
    for i in range(count):
        key = ids[i]
        if not visited[key >> 3] & (1 << (key & 7)):
            visited[key >> 3] |= <uint8_t>(1 << (key & 7))
            bound = bounds + head.cluster_of[key] * group
            for g in range(group):
                if bound[g] > thresholds[g]:
                    ob_prefetch(head.keys_int8 + <int64_t>key * head.d)
                    fresh[kept] = key
                    kept += 1
                    break
    return kept


cdef void _raise(Found *found, int64_t group, int64_t k, float *thresholds) noexcept nogil:
    # A key below the k-th best of every query head is of no use.
    cdef int64_t g
    for g in range(group):
        if found.sizes[g] >= k:
            thresholds[g] = <float>(found.packed[g * found.room + k - 1] >> 32)


cdef int64_t _next_open(Found *found, int64_t g, int64_t queue) noexcept nogil:
    # Where the best candidate of a query head is that was not expanded; -1 without one.
    cdef int64_t at = found.cursors[g], end = min(found.sizes[g], queue)
    cdef int64_t *row = found.packed + g * found.room
    while at < end and row[at] & 1:
        at += 1
    found.cursors[g] = at
    return at if at < end else -1


cdef void _fetch_next(Found *found, int64_t g, int64_t queue, Head *head) noexcept nogil:
    # Begin to fetch the neighbours of the key that query head `g` will expand next, if none better
    # comes until then.
    cdef int64_t at = _next_open(found, g, queue), i
    cdef const uint32_t *near
    if at >= 0:
        near = head.graph + <int64_t>key_of(found.packed[g * found.room + at]) * head.degree
        for i in range(0, head.degree, 16):
            ob_prefetch(near + i)


cdef void _walk(const int16_t *queries, int64_t group, Head *head, const uint32_t *seeds,
                int64_t seed_count, int64_t k, int64_t queue, uint8_t *visited, uint32_t *fresh,
                int32_t *scores, int64_t stride, uint32_t *places, const float *bounds,
                float *thresholds, Found *found) noexcept nogil:
    # Best-first, the query heads in turn: a key reached by one is offered to all of them.
    cdef int64_t kept, g, at, open_heads = group
    cdef int64_t *row
    for g in range(group):
        thresholds[g] = -INFINITY
    kept = _visit(seeds, seed_count, visited, fresh, group, bounds, head, thresholds)
    ob_score_int8(LEVEL, queries, group, head.keys_int8, head.d, fresh, kept, scores, stride)
    _offer(scores, stride, group, fresh, kept, places, found)
    found.scored = kept
    while open_heads > 0:
        open_heads = 0
        for g in range(group):
            at = _next_open(found, g, queue)
            if at < 0:
                continue
            open_heads += 1
            row = found.packed + g * found.room
            row[at] |= 1
            _fetch_next(found, (g + 1) % group, queue, head)
            _raise(found, group, k, thresholds)
            kept = _visit(head.graph + <int64_t>key_of(row[at]) * head.degree, head.degree,
                          visited, fresh, group, bounds, head, thresholds)
            if kept == 0:
                continue
            ob_score_int8(LEVEL, queries, group, head.keys_int8, head.d, fresh, kept, scores,
                          stride)
            _offer(scores, stride, group, fresh, kept, places, found)
            found.scored += kept


cdef int64_t _seed(const float *centroid_logits, int64_t group, int64_t seeds_per_head, Head *head,
                   int64_t *row, uint32_t *seeds) noexcept nogil:
    # The hub, then the entry of each of the best clusters of every query head.
    cdef int64_t g, c, size, cursor, count = 1
    seeds[0] = head.entries[0]
    for g in range(group):
        size = 0
        cursor = 0
        for c in range(head.clusters):
            insert(pack(ordered(centroid_logits[g * head.clusters + c]), <uint32_t>c), row,
                    &size, &cursor, seeds_per_head)
        for c in range(size):
            seeds[count] = head.entries[1 + key_of(row[c])]
            count += 1
    return count


def levels():
    """Name the ways to score int8 keys that this processor has, the slowest first."""
    return ("portable", "avx2", "avx512")[:LEVEL + 1]


def score_int8(const int16_t[:, ::1] queries, const int8_t[:, ::1] keys,
               const uint32_t[::1] ids, str level):
    """Score keys (m, d) of `ids` (n,) against queries (group, d) in one of the `levels`, for tests.

    Returns (group, n). The ids are trusted.
    """
    cdef int chosen = levels().index(level)
    cdef int64_t group = queries.shape[0], d = queries.shape[1], count = ids.shape[0]
    cdef int32_t[:, ::1] scores = np.zeros((group, count + 1), np.int32)
    if count > 0 and group > 0 and d > 0:
        ob_score_int8(chosen, &queries[0, 0], group, &keys[0, 0], d, &ids[0], count,
                      &scores[0, 0], count + 1)
    return np.ascontiguousarray(np.asarray(scores)[:, :count])


def find(object index, const float[:, ::1] queries, float scaling, int64_t wanted, bint walk,
         int64_t queue, bint all_scored, int64_t seeds_per_head, float slack):
    """Find the best `wanted` keys of every query head of one KV head.

    Returns top ids (group, k), read ids (r,) in rising order, logits (group, r), centroid logits
    (group, c or 0), keys scored. With `all_scored`, for a step that estimates, read are all keys
    that were scored exactly, and there are centroid logits; else the union of the best.
    """
    cdef Head head = borrow(index)
    cdef int64_t group = queries.shape[0], k = min(wanted, head.m), bytes_ = (head.m + 7) // 8
    cdef int64_t capacity = min(head.m, max(k + k // SPARE, queue if walk else 0)) if k > 0 else 0
    cdef int64_t width = max(SCAN_BLOCK, head.degree, 1 + group * seeds_per_head)
    cdef int64_t stride = max(1, min(head.m, group * capacity))
    cdef int64_t clusters = head.clusters if all_scored or (walk and k > 0) else 0
    cdef int64_t pool_size = 0, read_count = 0, seed_count
    cdef uint32_t[:, ::1] top = np.zeros((group, k + 1), np.uint32)
    cdef uint32_t[::1] pool = np.empty(stride, np.uint32)
    cdef float[:, ::1] logits = np.empty((group, stride), np.float32)
    cdef float[::1] centroid_logits = np.empty(group * clusters + 1, np.float32)
    cdef float[::1] row = np.empty(head.d, np.float32)
    cdef int16_t[:, ::1] quantised = np.empty((group, head.d), np.int16)
    cdef float[::1] bounds = np.empty(group * (clusters + 2) + 1, np.float32)
    cdef float *inverses = &bounds[group * clusters]
    cdef int32_t[:, ::1] scores = np.empty((group, width), np.int32)
    cdef uint32_t[:, ::1] ids = np.empty((2, width), np.uint32)
    cdef uint32_t[::1] places = np.empty(width + 8, np.uint32)
    cdef int32_t[::1] bars = np.empty(group, np.int32)
    cdef uint8_t[::1] visited = np.zeros(bytes_ + 8, np.uint8)
    cdef int64_t room = max(stride, 2 * capacity)  # `choose` needs as much as the pool
    cdef int64_t[::1] packed = np.zeros(group * (room + 2) + width + room, np.int64)
    cdef Found found
    found.capacity, found.room, found.scored = capacity, room, 0
    found.packed, found.sizes = &packed[0], &packed[group * room]
    found.cursors, found.bars = found.sizes + group, &bars[0]
    found.spare = &packed[group * (room + 2) + width]
    with nogil:
        if clusters > 0:
            ob_logits(LEVEL, &queries[0, 0], group, head.centroids, head.centroid_dtype, head.d,
                      NULL, clusters, scaling, &row[0], &centroid_logits[0], clusters)
        if k > 0:
            _quantise(&queries[0, 0], group, &head, &quantised[0, 0], inverses)
            if walk:
                seed_count = _seed(&centroid_logits[0], group, seeds_per_head, &head,
                                   found.cursors + group, &ids[0, 0])
                _bound(&queries[0, 0], group, &head, &centroid_logits[0], scaling, inverses, slack,
                       &bounds[0])
                _walk(&quantised[0, 0], group, &head, &ids[0, 0], seed_count, k, queue,
                      &visited[0], &ids[1, 0], &scores[0, 0], width, &places[0], &bounds[0],
                      inverses + group, &found)
            else:
                _scan(&quantised[0, 0], group, &head, &scores[0, 0], &places[0], &found)
            pool_size = union_of(&found, group, &visited[0], bytes_, &pool[0])
            ob_logits(LEVEL, &queries[0, 0], group, head.keys, head.dtype, head.d, &pool[0],
                      pool_size, scaling, &row[0], &logits[0, 0], stride)
            k = min(k, pool_size)
            choose(group, k, &logits[0, 0], stride, &pool[0], pool_size, found.packed, found.spare,
                   &top[0, 0], &visited[0], bytes_)
            read_count = pool_size
            if not all_scored:
                read_count = shrink(group, &logits[0, 0], stride, &pool[0], pool_size, &visited[0])
    return (np.asarray(top).reshape(-1)[:group * k].reshape(group, k),
            np.asarray(pool)[:read_count],
            np.ascontiguousarray(np.asarray(logits)[:, :read_count]),
            np.asarray(centroid_logits)[:group * clusters].reshape(group, clusters), found.scored)
