"""A Vamana graph whose queries are nodes while it is built, and are stitched out afterwards.

Owns the greedy search, the robust prune, insertion and the stitch (RobustVamana of OOD-DiskANN,
arXiv 2211.12850). Points are float32 and compared by squared L2: the caller has lengthened keys so
that this ranks like the inner product. Ids are trusted.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy

from openbook.indexstore._candidates cimport insert, key_of, ordered, pack

import numpy as np

cnp.import_array()


cdef struct Maker:
    const float *points  # (n, d)
    int64_t n, d, links
    float alpha
    uint32_t *ids  # (n, links)
    int32_t *sizes  # (n,)
    int64_t *packed  # candidates of a prune, nearest first
    uint32_t *kept  # (links,)
    uint32_t *stamps  # (n,)


cdef inline float _gap(Maker *maker, uint32_t a, uint32_t b) noexcept nogil:
    # Squared L2.
    cdef const float *left = maker.points + <int64_t>a * maker.d
    cdef const float *right = maker.points + <int64_t>b * maker.d
    cdef float total = 0, gap
    cdef int64_t j
    for j in range(maker.d):
        gap = left[j] - right[j]
        total += gap * gap
    return total


cdef inline int64_t _packed(float gap, uint32_t key) noexcept nogil:
    return pack(ordered(-gap), key)  # larger is nearer


cdef inline float _gap_of(int64_t packed) noexcept nogil:
    # The squared distance in a packed candidate: `ordered` undone.
    cdef int32_t bits = <int32_t>(packed >> 32)
    cdef float value
    if bits < 0:
        bits = bits ^ 0x7fffffff
    memcpy(&value, &bits, sizeof(value))
    return -value


cdef int _falling(const void *a, const void *b) noexcept nogil:
    cdef int64_t left = (<const int64_t *>a)[0], right = (<const int64_t *>b)[0]
    return (left < right) - (left > right)


cdef inline bint _holds(const uint32_t *ids, int64_t size, uint32_t key) noexcept nogil:
    cdef int64_t i
    for i in range(size):
        if ids[i] == key:
            return True
    return False


cdef void _choose(Maker *maker, uint32_t node, int64_t count) noexcept nogil:
    # The robust prune of `count` packed candidates; a candidate twice is taken once.
    cdef int64_t i, r, size = 0
    cdef uint32_t key
    cdef float gap
    cdef bint is_kept
    qsort(maker.packed, count, sizeof(int64_t), _falling)
    for i in range(count):
        if size == maker.links:
            break
        key, gap = key_of(maker.packed[i]), _gap_of(maker.packed[i])
        is_kept = key != node
        for r in range(size):
            if not is_kept:
                break
            is_kept = key != maker.kept[r] and maker.alpha * _gap(maker, key, maker.kept[r]) > gap
        if is_kept:
            maker.kept[size] = key
            size += 1
    memcpy(maker.ids + <int64_t>node * maker.links, maker.kept, size * sizeof(uint32_t))
    maker.sizes[node] = <int32_t>size


cdef void _add_reverse(Maker *maker, uint32_t node) noexcept nogil:
    # Every neighbour of a node learns of it; one whose list is full chooses again.
    cdef uint32_t mine[512]
    cdef uint32_t *theirs
    cdef uint32_t other
    cdef int64_t i, j, size, count = maker.sizes[node]
    memcpy(mine, maker.ids + <int64_t>node * maker.links, count * sizeof(uint32_t))
    for i in range(count):
        other = mine[i]
        theirs, size = maker.ids + <int64_t>other * maker.links, maker.sizes[other]
        if _holds(theirs, size, node):
            continue
        if size < maker.links:
            theirs[size] = node
            maker.sizes[other] += 1
            continue
        for j in range(size):
            maker.packed[j] = _packed(_gap(maker, other, theirs[j]), theirs[j])
        maker.packed[size] = _packed(_gap(maker, other, node), node)
        _choose(maker, other, size + 1)


cdef int64_t _visit(Maker *maker, uint32_t entry, uint32_t node, int64_t beam, int64_t *row,
                    uint32_t stamp) noexcept nogil:
    # Search for a node; what was expanded becomes `packed`. Returns how many.
    cdef int64_t size = 0, cursor = 0, count = 0, i
    cdef uint32_t key, near
    cdef const uint32_t *ids
    maker.stamps[entry] = stamp
    insert(_packed(_gap(maker, node, entry), entry), row, &size, &cursor, beam)
    while True:
        while cursor < size and row[cursor] & 1:
            cursor += 1
        if cursor >= size:
            return count
        maker.packed[count] = row[cursor]
        count += 1
        row[cursor] |= 1
        key = key_of(row[cursor])
        ids = maker.ids + <int64_t>key * maker.links
        for i in range(maker.sizes[key]):
            near = ids[i]
            if maker.stamps[near] != stamp:
                maker.stamps[near] = stamp
                insert(_packed(_gap(maker, node, near), near), row, &size, &cursor, beam)


cdef void _insert_all(Maker *maker, const uint32_t *order, const uint32_t *known, int64_t width,
                      int64_t keys, uint32_t entry, int64_t beam, int64_t *row,
                      uint32_t stamp) noexcept nogil:
    # One pass over all nodes; a query also has its exact neighbours for candidates.
    cdef int64_t i, j, count
    cdef uint32_t node, near
    for i in range(maker.n):
        node = order[i]
        count = _visit(maker, entry, node, beam, row, stamp + <uint32_t>i)
        for j in range(maker.sizes[node]):
            near = maker.ids[<int64_t>node * maker.links + j]
            maker.packed[count] = _packed(_gap(maker, node, near), near)
            count += 1
        if node >= keys:
            for j in range(width):
                near = known[(node - keys) * width + j]
                maker.packed[count] = _packed(_gap(maker, node, near), near)
                count += 1
        _choose(maker, node, count)
        _add_reverse(maker, node)


cdef void _stitch(Maker *maker, int64_t keys) noexcept nogil:
    # A key that led to queries may lead to what those led to; then it chooses again.
    cdef int64_t i, j, k, count
    cdef uint32_t near, beyond
    cdef bint led
    for i in range(keys):
        count, led = 0, False
        for j in range(maker.sizes[i]):
            near = maker.ids[i * maker.links + j]
            if near < keys:
                maker.packed[count] = _packed(_gap(maker, <uint32_t>i, near), near)
                count += 1
                continue
            led = True
            for k in range(maker.sizes[near]):
                beyond = maker.ids[<int64_t>near * maker.links + k]
                if beyond < keys:
                    maker.packed[count] = _packed(_gap(maker, <uint32_t>i, beyond), beyond)
                    count += 1
        if led:
            _choose(maker, <uint32_t>i, count)


def build(const float[:, ::1] points, const uint32_t[:, ::1] known, int64_t links, int64_t beam,
          float alpha):
    """Build the graph of the first points, the keys; the others are queries.

    `points` (keys + s, d); `known` (s, k): the exact neighbours of each query. Two passes, the
    first with an alpha of one. Returns the keys' lists uint32 (keys, links), their sizes int32
    (keys,) and the entry, the key nearest to the mean key.
    """
    cdef int64_t n = points.shape[0], queries = known.shape[0], width = known.shape[1]
    cdef int64_t keys = n - queries, room = n + links * (links + 1) + width
    assert 0 < links <= 512, "a list fits the scratch of _add_reverse"
    rows = np.asarray(points)[:keys]
    cdef uint32_t entry = ((rows - rows.mean(axis=0)) ** 2).sum(axis=1).argmin()
    cdef uint32_t[::1] order = np.random.default_rng(0).permutation(n).astype(np.uint32)
    cdef uint32_t[:, ::1] ids = np.zeros((n, links), np.uint32)
    cdef int32_t[::1] sizes = np.zeros(n, np.int32)
    cdef int64_t[::1] packed = np.empty(room, np.int64), row = np.empty(beam + 1, np.int64)
    cdef uint32_t[::1] kept = np.empty(links, np.uint32), stamps = np.zeros(n, np.uint32)
    cdef Maker maker = Maker(&points[0, 0], n, points.shape[1], links, 1.0, &ids[0, 0], &sizes[0],
                             &packed[0], &kept[0], &stamps[0])
    cdef const uint32_t *near = &known[0, 0] if queries > 0 else NULL
    with nogil:
        _insert_all(&maker, &order[0], near, width, keys, entry, beam, &row[0], 1)
        maker.alpha = alpha
        _insert_all(&maker, &order[0], near, width, keys, entry, beam, &row[0], 1 + <uint32_t>n)
        _stitch(&maker, keys)
    return np.asarray(ids)[:keys], np.asarray(sizes)[:keys], int(entry)
