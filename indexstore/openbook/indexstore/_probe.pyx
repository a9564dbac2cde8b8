"""Find the best keys of a KV head by its clusters: which may hold one, then codes, then keys.

Owns the bounds of the clusters, the two sweeps over the codes and the exact re-scoring of what they
found. What is then made of it is _layer.pyx's.
head.HeadIndex has checked every array; the loops release the GIL, create no Python objects and
never raise. Their NumPy twin is reference_probe.probe.
"""

cimport numpy as cnp
from libc.stdint cimport int16_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

from openbook.indexstore._candidates cimport choose, marked, shrink
from openbook.indexstore._estimate cimport place, take
from openbook.indexstore._head cimport Head, borrow

import numpy as np

from openbook.indexstore.head import CANDIDATES_PER_KEY, DEFAULT_KEYS

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int ob_best_level()
    int64_t ob_lowest_bit(uint64_t word)
    int OB_FLOAT32
    int64_t ob_stored_bytes(int dtype)
    void ob_prefetch(const void *address)
    void ob_range(const float *numbers, int64_t count, float *low, float *high)
    void ob_logits(int level, const float *queries, int64_t group, const void *keys, int dtype,
                   int64_t d, const uint32_t *ids, int64_t count, float scaling, float *row,
                   float *logits, int64_t stride)

cdef extern from "codes.h" nogil:
    int OB_KEYS
    int OB_ROW
    void ob_sums(int level, const uint8_t *tables, const uint8_t *block, int64_t quads,
                 const int16_t *starts, int16_t *sums)
    void ob_fill(int16_t value, int16_t *target)
    uint32_t ob_reaching16(int level, const int16_t *values, int16_t bar)
    float ob_width(const float *turned, const float *spreads, int64_t count)
    float ob_tabulate(const float *turned, const float *codebook, int64_t pairs, int64_t quads,
                      float span, float *raw, uint8_t *tables, float *zero)
    void ob_levels(const float *logits, const float *spreads, int64_t count, float peak,
                   float inverse, float zero, float reach, int16_t *bases, int16_t *bounds)
    int64_t ob_count_reaching(const int16_t *sums, int64_t count, int16_t bar)
    int16_t ob_bar(const int16_t *sums, int64_t count, int64_t wanted, int16_t low)

cdef int LEVEL = ob_best_level()
cdef int64_t PLANNED = DEFAULT_KEYS
cdef int64_t PER_KEY = CANDIDATES_PER_KEY

cdef enum:
    BINS = 16000 // 16 + 1  # of 16 units each, from 0 down to OB_BASE_MIN
    NO_KEY = -32768  # the sum of a place where no key stands: it reaches no bar
    AHEAD = 6  # blocks whose fetching begins before they are needed
    ENOUGH = 2  # the first sweep looks at this many keys for each candidate that is wanted


cdef void _prepare(const float *turned, Head *head, const float *logits, float reach, float *raw,
                   Probe *probe) noexcept nogil:
    # The tables of a query, and the levels of its clusters.
    cdef int64_t c, pairs = (head.d + 1) // 2
    cdef float low, high, wide, inverse, zero
    ob_range(logits, head.clusters, &low, &high)
    wide = ob_width(turned, head.code_spreads, 2 * pairs)
    inverse = ob_tabulate(turned, head.codebook, pairs, head.quads, high - low, raw, probe.tables,
                          &zero)
    ob_levels(logits, head.spreads, head.clusters, high, inverse, zero, reach * wide * inverse,
              probe.bases, probe.bounds)
    for c in range(head.clusters, (head.clusters + 15) // 16 * 16):
        probe.bases[c] = probe.bounds[c] = NO_KEY


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


cdef int64_t _list(Head *head, const int16_t *levels, int16_t bar, uint16_t stamp, int64_t count,
                   Probe *probe, int64_t *scored) noexcept nogil:
    # Add the blocks of clusters whose level reaches the bar to the `count` that this head has
    # listed before; returns how many there are then.
    cdef int64_t first, cluster, block
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
                    scored[0] += min(OB_KEYS, head.m - block * OB_KEYS)
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


cdef void _look(Head *head, int64_t first, int64_t count, Probe *probe) noexcept nogil:
    # Score the keys of the listed blocks first, …, count - 1.
    cdef int64_t i, begin, end, at, cluster
    cdef int16_t starts[32]
    cdef int16_t *sums
    for i in range(first, min(first + AHEAD, count)):
        _fetch(head, probe.blocks[i])
    for i in range(first, count):
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
        sums = probe.sums + i * OB_KEYS
        ob_sums(LEVEL, probe.tables, head.codes + probe.blocks[i] * head.quads * OB_ROW,
                head.quads, starts, sums)
        for at in range(end - begin, OB_KEYS):
            sums[at] = NO_KEY


cdef void _mark(Head *head, int64_t count, int64_t wanted, int16_t bar, Probe *probe,
                uint16_t *marks) noexcept nogil:
    # Mark the best `wanted` keys of the `count` blocks that were looked at: those above the bar,
    # and of those at the bar the first ones. `marks` (all blocks) has a bit for each key.
    cdef int64_t i, block, at, reaching = ob_count_reaching(probe.sums, count * OB_KEYS, bar)
    cdef int64_t spare = wanted
    cdef int16_t sure = bar
    cdef uint32_t bits
    cdef uint64_t word
    if reaching > wanted:
        sure = <int16_t>(bar + 1)
        spare = wanted - ob_count_reaching(probe.sums, count * OB_KEYS, sure)
        memset(probe.tied, 0, (head.m + OB_KEYS - 1) // OB_KEYS * sizeof(uint16_t) + 8)
    for i in range(count):
        block = probe.blocks[i]
        bits = ob_reaching16(LEVEL, probe.sums + i * OB_KEYS, sure)
        marks[block] |= <uint16_t>bits
        if sure > bar:
            bits ^= ob_reaching16(LEVEL, probe.sums + i * OB_KEYS, bar)
            probe.tied[block] = <uint16_t>bits
    block = 0
    while sure > bar and spare > 0:
        memcpy(&word, probe.tied + block, 8)
        while word and spare > 0:
            at = ob_lowest_bit(word)
            marks[block + at // OB_KEYS] |= <uint16_t>(1 << at % OB_KEYS)
            word &= word - 1
            spare -= 1
        block += 4


cdef void _search(Head *head, uint16_t stamp, int64_t wanted, Probe *probe, uint16_t *marks,
                  int64_t *scored) noexcept nogil:
    # The best clusters give the query head a bar; then all that may hold a key above it. No sum of
    # a key lies below the base of its cluster.
    cdef int16_t bar = _aim(head, ENOUGH * wanted, probe)
    cdef int64_t first = _list(head, probe.bases, bar, stamp, 0, probe, scored), count
    _look(head, 0, first, probe)
    bar = ob_bar(probe.sums, first * OB_KEYS, wanted, bar)
    count = _list(head, probe.bounds, bar, stamp, first, probe, scored)
    _look(head, first, count, probe)
    bar = ob_bar(probe.sums, count * OB_KEYS, wanted, bar)
    _mark(head, count, wanted, bar, probe, marks)


cpdef int64_t candidates_of(int64_t queue, int64_t keys) noexcept nogil:
    """Return how many keys are scored exactly for each query head by a plan's `queue`."""
    return max((queue * keys + PLANNED - 1) // PLANNED, PER_KEY * keys)


cdef int64_t lay_out(Head *head, int64_t group, int64_t wanted, int64_t candidates, char *block,
                     Search *search) noexcept nogil:
    # Place the arrays of a search in a block of memory, or with NULL none; returns their bytes.
    cdef int64_t k = min(wanted, head.m), codes = 4 * head.quads, c = head.clusters
    cdef int64_t capacity = min(head.m, max(k, candidates)) if k > 0 else 0
    cdef int64_t stride = max(1, min(head.m, group * capacity)), levels = (c + 15) // 16 * 16
    cdef int64_t blocks = (head.m + OB_KEYS - 1) // OB_KEYS
    cdef char *at = block
    search.group, search.k, search.stride, search.capacity = group, k, stride, capacity
    search.mask_bytes, search.scored = 2 * blocks, 0
    search.packed = <int64_t *>take(&at, 8 * stride)
    search.spare = <int64_t *>take(&at, 8 * stride)
    search.probe.tables = <uint8_t *>take(&at, 16 * codes)
    search.probe.bases = <int16_t *>take(&at, 2 * levels)
    search.probe.bounds = <int16_t *>take(&at, 2 * levels)
    search.probe.places = <int64_t *>take(&at, 8 * (c + 1))
    search.probe.blocks = <uint32_t *>take(&at, 4 * blocks)
    search.probe.owners = <uint32_t *>take(&at, 4 * blocks)
    search.probe.sums = <int16_t *>take(&at, 2 * OB_KEYS * blocks)
    search.probe.tied = <uint16_t *>take(&at, 2 * blocks + 8)
    search.probe.stamps = <uint16_t *>take(&at, 2 * blocks)
    search.probe.bins = <uint32_t *>take(&at, 4 * BINS)
    search.turned = <float *>take(&at, 8 * group * codes)
    search.raw = <float *>take(&at, 64 * codes)
    search.centroid_logits = <float *>take(&at, 4 * group * c)
    search.logits = <float *>take(&at, 4 * group * stride)
    search.lifts = <float *>take(&at, 4 * group)
    search.pool = <uint32_t *>take(&at, 4 * stride)
    search.top = <uint32_t *>take(&at, 4 * group * (k + 1))
    search.visited = <uint8_t *>take(&at, search.mask_bytes + 8)
    place(head, group, stride, c, &at, &search.weights)
    return at - block


cdef int64_t find_keys(Head *head, const float *queries, float scaling, float reach, bint ranked,
                       bint all_scored, Search *search) noexcept nogil:
    # Search for every query head; returns how many keys there are to read, with their logits
    # (group, that many) at the front of `logits`: all that were scored exactly, or each query
    # head's best k. Those are written to `top` if they are to be `ranked`.
    cdef int64_t g, c, i, pool_size, count, group = search.group
    cdef int64_t directions = (head.d + 1) // 2 * 2
    cdef int64_t row_bytes = head.dv * ob_stored_bytes(head.dtype)
    ob_logits(LEVEL, queries, group, head.centroids, head.centroid_dtype, head.d, NULL,
              head.clusters, scaling, search.weights.row, search.centroid_logits, head.clusters)
    if search.k == 0:
        return 0
    memset(search.probe.stamps, 0, search.mask_bytes)
    memset(search.visited, 0, search.mask_bytes + 8)
    search.probe.places[0] = 0
    for c in range(head.clusters):
        search.probe.places[c + 1] = search.probe.places[c] + head.counts[c]
    ob_logits(LEVEL, queries, group, head.code_basis, OB_FLOAT32, head.d, NULL, directions, scaling,
              search.weights.row, search.turned, directions)
    for g in range(group):
        _prepare(search.turned + g * directions, head, search.centroid_logits + g * head.clusters,
                 reach, search.raw, &search.probe)
        _search(head, <uint16_t>(1 + g), search.capacity, &search.probe,
                <uint16_t *>search.visited, &search.scored)
    # Each query head has found k keys at least, as the clusters above the first bar hold as many:
    # but not where the page of their counts was lost and zeros stand there (guard.h).
    pool_size = marked(search.visited, search.mask_bytes, search.pool)
    search.k = min(search.k, pool_size)
    for i in range(pool_size if all_scored else 0):  # what the estimate and the sums will ask for
        ob_prefetch(head.cluster_of + search.pool[i])
        ob_prefetch(<const char *>head.values + search.pool[i] * row_bytes)
        ob_prefetch(<const char *>head.values + search.pool[i] * row_bytes + 64)
    ob_logits(LEVEL, queries, group, head.keys, head.dtype, head.d, search.pool, pool_size,
              scaling, search.weights.row, search.logits, search.stride)
    if ranked or not all_scored:
        choose(group, search.k, search.logits, search.stride, search.pool, pool_size,
               search.packed, search.spare, search.top if ranked else NULL, search.visited,
               search.mask_bytes)
    count = pool_size
    if not all_scored:
        count = shrink(group, search.logits, search.stride, search.pool, pool_size,
                       search.visited)
    for g in range(1, group):
        memmove(search.logits + g * count, search.logits + g * search.stride,
                count * sizeof(float))
    return count


cdef char *room(list workspace, int64_t number, int64_t size) except NULL:
    # One of the blocks of memory which the list keeps from one search to the next.
    while len(workspace) <= number:
        workspace.append(np.empty(size, np.uint8))
    if workspace[number].nbytes < size:
        workspace[number] = np.empty(size, np.uint8)
    return cnp.PyArray_BYTES(workspace[number])


cdef object copied(const void *numbers, tuple shape, object dtype):
    cdef object array = np.empty(shape, dtype)
    memcpy(cnp.PyArray_DATA(array), numbers, array.nbytes)
    return array


def find(object index, const float[:, ::1] queries, float scaling, int64_t wanted,
         int64_t candidates, float reach, bint all_scored, list workspace):
    """Find the best `wanted` keys of every query head of one KV head.

    `candidates` per query head are scored exactly. A cluster is looked at unless its keys would
    have to lie more than `reach` times their spread above its centroid to be among them.
    `workspace`, empty at first, keeps memory for the thread's next call. Returns top ids (group,
    k), read ids (r,) in rising order, logits (group, r), centroid logits (group, c), keys scored.
    Read are all keys that were scored exactly, if `all_scored`, or else the union of the best.
    """
    cdef Head head = borrow(index)
    cdef Search search
    cdef int64_t group = queries.shape[0], count
    cdef int64_t size = lay_out(&head, group, wanted, candidates, NULL, &search)
    lay_out(&head, group, wanted, candidates, room(workspace, 0, size), &search)
    with nogil:
        count = find_keys(&head, &queries[0, 0], scaling, reach, True, all_scored, &search)
    return (copied(search.top, (group, search.k), np.uint32),
            copied(search.pool, (count,), np.uint32),
            copied(search.logits, (group, count), np.float32),
            copied(search.centroid_logits, (group, head.clusters), np.float32),
            search.scored)
