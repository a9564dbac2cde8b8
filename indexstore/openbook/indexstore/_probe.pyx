"""Find the best keys of a KV head by its clusters: which may hold one, then codes, then keys.

Owns the bounds of the clusters, the two sweeps over the codes and the exact re-scoring of what they
found; and the whole step of a head, from the search to the partial. A query's tables are made in
_tables.pxd.
head.HeadIndex has checked every array; the loops release the GIL, create no Python objects and
never raise. Their NumPy twin is reference_probe.probe.
"""

cimport numpy as cnp
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

from openbook.indexstore._candidates cimport Found, choose, keep_best, pack, union_of
from openbook.indexstore._estimate cimport Weights, combine, left_of
from openbook.indexstore._head cimport Head, borrow
from openbook.indexstore._tables cimport BASE_MIN, tabulate, turn

import numpy as np

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int ob_best_level()
    int64_t ob_lowest_bit(uint64_t word)
    void ob_prefetch(const void *address)
    void ob_range(const float *numbers, int64_t count, float *low, float *high)
    void ob_logits(int level, const float *queries, int64_t group, const void *keys, int dtype,
                   int64_t d, const uint32_t *ids, int64_t count, float scaling, float *row,
                   float *logits, int64_t stride)

cdef extern from "codes.h" nogil:
    int OB_KEYS
    int OB_ROW
    uint32_t ob_block(int level, const uint8_t *tables, const uint8_t *block, int64_t quads,
                      const int16_t *starts, int16_t bar, int16_t *sums)
    void ob_fill(int16_t value, int16_t *target)
    uint32_t ob_reaching16(int level, const int16_t *values, int16_t bar)
    void ob_levels(const float *logits, const float *spreads, int64_t count, float peak,
                   float inverse, float zero, float reach, float lowest, int16_t *bases,
                   int16_t *bounds)

cdef int LEVEL = ob_best_level()

cdef enum:
    BINS = 1001  # of 16 units each, from 0 down to BASE_MIN = -16000
    AHEAD = 6  # blocks whose fetching begins before they are needed
    ENOUGH = 2  # the first sweep looks at this many keys for each candidate that is wanted


cdef struct Probe:
    # One query head's search: what it makes of the clusters and of the codes, in integers.
    float *turned  # (8 * quads,) the query in the directions of the codes
    uint8_t *tables  # (4 * quads, 16)
    int16_t *bases  # (clusters in whole sixteens,) the centroid's score; 0 is the best one's
    int16_t *bounds  # (the same,) what a key of the cluster may come to
    int64_t *places  # (clusters + 1,) of each cluster's first key
    uint32_t *blocks  # (blocks,) to be looked at
    uint32_t *owners  # (blocks,) a cluster of which each of them has keys
    uint16_t *stamps  # (all blocks,) the query head that looked at each last, from 1; 0: none did
    uint32_t *bins  # (BINS,)


cdef void _prepare(const float *query, Head *head, const float *logits, float scaling,
                   float reach, float *raw, Probe *probe) noexcept nogil:
    # The tables of a query, and the levels of its clusters.
    cdef int64_t c
    cdef float low, high, wide, inverse, zero
    ob_range(logits, head.clusters, &low, &high)
    wide = turn(query, head, scaling, probe.turned)
    inverse = tabulate(probe.turned, head, high - low, raw, probe.tables, &zero)
    ob_levels(logits, head.spreads, head.clusters, high, inverse, zero, reach * wide * inverse,
              BASE_MIN, probe.bases, probe.bounds)
    for c in range(head.clusters, (head.clusters + 15) // 16 * 16):
        probe.bases[c] = probe.bounds[c] = -32768


cdef int16_t _aim(Head *head, int64_t enough, Probe *probe) noexcept nogil:
    # The bar so low that the clusters with bases above it hold `enough` keys, and no lower.
    cdef int64_t c, held = 0
    memset(probe.bins, 0, BINS * sizeof(uint32_t))
    for c in range(head.clusters):
        probe.bins[-probe.bases[c] >> 4] += head.counts[c]
    for c in range(BINS):
        held += probe.bins[c]
        if held >= enough:
            break
    return <int16_t>(-16 * min(c, BINS - 1) - 15)


cdef int64_t _list(Head *head, const int16_t *levels, int16_t bar, uint16_t stamp, Probe *probe,
                   Found *found) noexcept nogil:
    # The blocks of clusters whose level reaches the bar, but those that this head has looked at.
    cdef int64_t first, cluster, block, count = 0
    cdef uint32_t bits
    for first in range(0, head.clusters, 16):
        bits = ob_reaching16(LEVEL, levels + first, bar)
        while bits:
            cluster = first + ob_lowest_bit(bits)
            bits &= bits - 1
            for block in range(probe.places[cluster] // OB_KEYS,
                               (probe.places[cluster + 1] - 1) // OB_KEYS + 1):
                if probe.stamps[block] == stamp:
                    continue
                if probe.stamps[block] == 0:
                    found.scored += min(OB_KEYS, head.m - block * OB_KEYS)
                probe.stamps[block] = stamp
                probe.blocks[count] = <uint32_t>block
                probe.owners[count] = <uint32_t>cluster
                count += 1
    return count


cdef void _fetch(Head *head, int64_t block) noexcept nogil:
    # Begin to fetch a block's codes.
    cdef const uint8_t *codes = head.codes + block * head.quads * OB_ROW
    cdef int64_t at
    for at in range(0, head.quads * OB_ROW, 64):
        ob_prefetch(codes + at)


cdef void _look(Head *head, int64_t g, int64_t count, Probe *probe, Found *found) noexcept nogil:
    # Score the keys of the listed blocks, and keep those that reach the bar.
    cdef int64_t i, begin, end, at, cluster
    cdef int16_t starts[32]
    cdef int16_t sums[16]
    cdef uint32_t bits
    cdef int64_t *row = found.packed + g * found.room
    for i in range(min(AHEAD, count)):
        _fetch(head, probe.blocks[i])
    for i in range(count):
        if i + AHEAD < count:
            _fetch(head, probe.blocks[i + AHEAD])
        begin = <int64_t>probe.blocks[i] * OB_KEYS
        end = min(begin + OB_KEYS, head.m)
        cluster = probe.owners[i]
        while probe.places[cluster] > begin:
            cluster -= 1
        while cluster < head.clusters and probe.places[cluster] < end:
            at = max(0, probe.places[cluster] - begin)
            ob_fill(probe.bases[cluster], starts + at)
            cluster += 1
        bits = ob_block(LEVEL, probe.tables, head.codes + probe.blocks[i] * head.quads * OB_ROW,
                        head.quads, starts, <int16_t>found.bars[g], sums)
        if end < begin + OB_KEYS:
            bits &= (1 << (end - begin)) - 1
        while bits:
            at = ob_lowest_bit(bits)
            bits &= bits - 1
            if found.sizes[g] == found.room:
                keep_best(found, g)
            row[found.sizes[g]] = pack(sums[at], <uint32_t>(begin + at))
            found.sizes[g] += 1
    keep_best(found, g)


cdef void _search(Head *head, int64_t g, Probe *probe, Found *found) noexcept nogil:
    # The best clusters give the query head a bar; then all that may hold a key above it.
    cdef int16_t bar = _aim(head, ENOUGH * found.capacity, probe)
    found.bars[g] = -32767
    found.sizes[g] = 0
    _look(head, g, _list(head, probe.bases, bar, <uint16_t>(1 + g), probe, found), probe, found)
    bar = <int16_t>found.bars[g]
    _look(head, g, _list(head, probe.bounds, bar, <uint16_t>(1 + g), probe, found), probe, found)


cdef struct Search:
    # All that one search needs, laid out in one block of memory.
    Probe probe
    Found found
    Weights weights
    int64_t group, k, stride, mask_bytes
    float *raw  # (4 * quads * 16,)
    float *row  # (max(d, dv),)
    float *centroid_logits  # (group, c)
    float *logits  # (group, stride)
    float *left  # (c,)
    uint32_t *pool  # (stride,) the candidates of all, then the keys read
    uint32_t *top  # (group, k)
    uint8_t *visited  # (mask_bytes + 8,)


cdef inline char *_take(char **at, int64_t bytes_) noexcept nogil:
    # The next part of the block, in whole cache lines.
    cdef char *mine = at[0]
    at[0] += (bytes_ + 63) // 64 * 64
    return mine


cdef int64_t _lay_out(Head *head, int64_t group, int64_t wanted, int64_t candidates, char *block,
                      Search *search) noexcept nogil:
    # Place the arrays of a search in a block of memory, or with NULL none; returns their bytes.
    cdef int64_t k = min(wanted, head.m), codes = 4 * head.quads, c = head.clusters
    cdef int64_t capacity = min(head.m, max(k, candidates)) if k > 0 else 0
    cdef int64_t stride = max(1, min(head.m, group * capacity))
    cdef int64_t room = max(stride, 2 * capacity + 16), levels = (c + 15) // 16 * 16
    cdef int64_t blocks = (head.m + OB_KEYS - 1) // OB_KEYS
    cdef char *at = block
    search.group, search.k, search.stride = group, k, stride
    search.mask_bytes = (head.m + 7) // 8
    search.found.capacity, search.found.room, search.found.scored = capacity, room, 0
    search.found.packed = <int64_t *>_take(&at, group * room * 8)
    search.found.sizes = <int64_t *>_take(&at, group * 8)
    search.found.bars = <int32_t *>_take(&at, group * 4)
    search.found.cursors = NULL
    search.found.spare = <int64_t *>_take(&at, 8 * room)
    search.probe.turned = <float *>_take(&at, 2 * codes * 4)
    search.probe.tables = <uint8_t *>_take(&at, 16 * codes)
    search.probe.bases = <int16_t *>_take(&at, 2 * levels)
    search.probe.bounds = <int16_t *>_take(&at, 2 * levels)
    search.probe.places = <int64_t *>_take(&at, 8 * (c + 1))
    search.probe.blocks = <uint32_t *>_take(&at, 4 * blocks)
    search.probe.owners = <uint32_t *>_take(&at, 4 * blocks)
    search.probe.stamps = <uint16_t *>_take(&at, 2 * blocks)
    search.probe.bins = <uint32_t *>_take(&at, 4 * BINS)
    search.raw = <float *>_take(&at, 64 * codes)
    search.row = <float *>_take(&at, 4 * max(head.d, head.dv))
    search.centroid_logits = <float *>_take(&at, 4 * group * c)
    search.logits = <float *>_take(&at, 4 * group * stride)
    search.left = <float *>_take(&at, 4 * c)
    search.pool = <uint32_t *>_take(&at, 4 * stride)
    search.top = <uint32_t *>_take(&at, 4 * group * (k + 1))
    search.visited = <uint8_t *>_take(&at, search.mask_bytes + 8)
    search.weights.keys = <float *>_take(&at, 4 * group * stride)
    search.weights.clusters = <float *>_take(&at, 4 * group * c)
    search.weights.peaks = <float *>_take(&at, 4 * group)
    search.weights.totals = <double *>_take(&at, 8 * group)
    search.weights.rests = <double *>_take(&at, 8 * group)
    search.weights.fetched = <double *>_take(&at, 8 * group)
    search.weights.sums = <double *>_take(&at, 8 * c)
    search.weights.scores = <float *>_take(&at, 4 * c)
    search.weights.heavy = <uint32_t *>_take(&at, 4 * (c + 1))
    return at - block


cdef int64_t _find(Head *head, const float *queries, float scaling, float reach,
                   bint ranked, Search *search) noexcept nogil:
    # Search for every query head; returns how many keys there are to read, with their logits
    # (group, that many) at the front of `logits`. `top` is written if they are to be `ranked`.
    cdef int64_t g, c, i, pool_size, count, group = search.group
    ob_logits(LEVEL, queries, group, head.centroids, head.centroid_dtype, head.d, NULL,
              head.clusters, scaling, search.row, search.centroid_logits, head.clusters)
    if search.k == 0:
        return 0
    memset(search.probe.stamps, 0, (head.m + OB_KEYS - 1) // OB_KEYS * sizeof(uint16_t))
    search.probe.places[0] = 0
    for c in range(head.clusters):
        search.probe.places[c + 1] = search.probe.places[c] + head.counts[c]
    for g in range(group):
        _prepare(queries + g * head.d, head, search.centroid_logits + g * head.clusters, scaling,
                 reach, search.raw, &search.probe)
        _search(head, g, &search.probe, &search.found)
    # Each query head has found k keys at least, as the clusters above the first bar hold as many:
    # but not where the page of their counts was lost and zeros stand there (guard.h).
    pool_size = union_of(&search.found, group, search.visited, search.mask_bytes, search.pool)
    search.k = min(search.k, pool_size)
    for i in range(pool_size):
        ob_prefetch(head.cluster_of + search.pool[i])  # the estimate asks for it
    ob_logits(LEVEL, queries, group, head.keys, head.dtype, head.d, search.pool, pool_size,
              scaling, search.row, search.logits, search.stride)
    count = choose(&search.found, group, search.k, search.logits, search.stride,
                   search.pool, pool_size, search.top if ranked else NULL, search.visited,
                   search.mask_bytes)
    for g in range(1, group):
        memmove(search.logits + g * count, search.logits + g * search.stride,
                count * sizeof(float))
    return count


cdef char *_room(list workspace, int64_t size) except NULL:
    # A block of memory, which the list keeps from one search to the next.
    if not workspace:
        workspace.append(np.empty(size, np.uint8))
    elif workspace[0].nbytes < size:
        workspace[0] = np.empty(size, np.uint8)
    return cnp.PyArray_BYTES(workspace[0])


cdef object _copied(const void *numbers, tuple shape, object dtype):
    cdef object array = np.empty(shape, dtype)
    memcpy(cnp.PyArray_DATA(array), numbers, array.nbytes)
    return array


def find(object index, const float[:, ::1] queries, float scaling, int64_t wanted,
         int64_t candidates, float reach, list workspace):
    """Find the best `wanted` keys of every query head of one KV head.

    `candidates` per query head are scored exactly. A cluster is looked at unless its keys would
    have to lie more than `reach` times their spread above its centroid to be among them.
    `workspace`, empty at first, keeps memory for the thread's next call. Returns top ids (group,
    k), read ids (r,) their union in the order of ids, logits (group, r), centroid logits (group,
    c), keys scored.
    """
    cdef Head head = borrow(index)
    cdef Search search
    cdef int64_t group = queries.shape[0], count
    cdef int64_t size = _lay_out(&head, group, wanted, candidates, NULL, &search)
    _lay_out(&head, group, wanted, candidates, _room(workspace, size), &search)
    with nogil:
        count = _find(&head, &queries[0, 0], scaling, reach, True, &search)
    return (_copied(search.top, (group, search.k), np.uint32),
            _copied(search.pool, (count,), np.uint32),
            _copied(search.logits, (group, count), np.float32),
            _copied(search.centroid_logits, (group, head.clusters), np.float32),
            search.found.scored)


def attend(list parts, list workspace, float lift_log_max):
    """Find and attend for KV heads of several requests, one after the other, without the GIL.

    A part is (step, first, stop): KV heads first, …, stop - 1 of a head.Step, of which `out`,
    `lse`, `estimated_lse` and `counts` are written. `workspace` as in `find`. Returns for each of
    those heads the ids read (r,) and their logits (group, r), or nothing without evidence.
    """
    cdef Head head
    cdef Search search
    cdef int64_t number, first, stop, group, count, size, wanted, at
    cdef float scaling, reach
    cdef bint estimate, evidence
    cdef const float *queries
    cdef float *lifts
    cdef float *outs
    cdef float *lse
    cdef float *estimated
    cdef const int64_t[::1] candidates
    cdef const float[::1] reaches
    cdef int64_t[:, ::1] counts
    found = []
    for step, first, stop in parts:
        (heads, asked, scaling, wanted, candidates, reaches, lifted, estimate, evidence, out, lses,
         rests, counts) = step
        group = asked.shape[0] // len(heads)
        for number in range(first, stop):
            head = borrow(heads[number])
            reach, at, lift = reaches[number], number * group, lifted[number]
            size = _lay_out(&head, group, wanted, candidates[number], NULL, &search)
            _lay_out(&head, group, wanted, candidates[number], _room(workspace, size), &search)
            queries = <const float *>cnp.PyArray_DATA(asked) + at * head.d
            lifts = NULL if lift is None else <float *>cnp.PyArray_DATA(lift)
            outs = <float *>cnp.PyArray_DATA(out) + at * head.dv
            lse = <float *>cnp.PyArray_DATA(lses) + at
            estimated = <float *>cnp.PyArray_DATA(rests) + at
            with nogil:
                count = _find(&head, queries, scaling, reach, False, &search)
                memset(outs, 0, group * head.dv * sizeof(float))
                if estimate:
                    left_of(&head, search.pool, count, search.left)
                combine(LEVEL, &head, group, search.pool, count, search.logits,
                        search.centroid_logits, search.left if estimate else NULL, lifts,
                        lift_log_max, &search.weights, search.row, outs, lse, estimated)
            counts[number, 0], counts[number, 1] = count, search.found.scored
            counts[number, 2] = head.clusters
            if evidence:
                found.append((_copied(search.pool, (count,), np.uint32),
                              _copied(search.logits, (group, count), np.float32)))
    return found
