"""The loops of a build: codewords and codes of keys; who is wanted together, who is reachable.

build.py has checked what comes in; reference_build.py and reference_probe.py hold the plain twins.
The kernels release the GIL, never create Python objects and never raise.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

import numpy as np

cdef extern from "kernels.h" nogil:
    int OB_FLOAT32
    int ob_best_level()
    void ob_logits(int level, const float *queries, int64_t group, const void *keys, int dtype,
                   int64_t d, const uint32_t *ids, int64_t count, float scaling, float *row,
                   float *logits, int64_t stride)

cdef extern from "codes.h" nogil:
    void ob_cells(const float *x, const float *y, int64_t count, const float *words,
                  int32_t *cells)

cdef int LEVEL = ob_best_level()


cdef int64_t _keep_best(float value, uint32_t key, float *best, uint32_t *row, int64_t kept,
                        int64_t width) noexcept nogil:
    # Insert into a descending row of at most `width`; on a tie the earlier stays. New size.
    cdef int64_t i
    if kept == width:
        if width == 0 or value <= best[width - 1]:
            return kept
        i = width - 1
    else:
        i = kept
        kept += 1
    while i > 0 and best[i - 1] < value:
        best[i] = best[i - 1]
        row[i] = row[i - 1]
        i -= 1
    best[i] = value
    row[i] = key
    return kept


def companions(const int32_t[:, ::1] neighbours, int64_t m, int64_t width, int64_t occurrences_max,
               int64_t span, const float[::1] discount):
    """Return for each key the keys that training queries want with it, best first: (m, width).

    Two keys of one list at most `span` ranks apart share one occurrence; its weight is `discount`
    of the other key. A key looks at its `occurrences_max` best-ranked occurrences. Rows are padded
    with the key itself.
    """
    cdef int64_t s = neighbours.shape[0], k = neighbours.shape[1], q, r, x, y, i, at, low, high
    cdef int64_t touched_count, kept
    cdef uint32_t[:, ::1] out = np.empty((m, width), np.uint32)
    cdef int64_t[::1] starts = np.zeros(m + 1, np.int64)
    cdef int64_t[::1] fill = np.zeros(m + 1, np.int64)
    cdef int64_t[::1] occurrence = np.empty(max(1, s * k), np.int64)
    cdef float[::1] weight = np.zeros(m, np.float32)
    cdef uint32_t[::1] touched = np.empty(m, np.uint32)
    cdef float[::1] best = np.empty(width, np.float32)
    with nogil:
        for q in range(s):
            for r in range(k):
                starts[neighbours[q, r] + 1] += 1
        for x in range(m):
            starts[x + 1] += starts[x]
            fill[x] = starts[x]
        # Rank by rank, so that each key's occurrences stand best-ranked first.
        for r in range(k):
            for q in range(s):
                x = neighbours[q, r]
                occurrence[fill[x]] = q * k + r
                fill[x] += 1
        for x in range(m):
            touched_count = 0
            for at in range(starts[x], min(starts[x + 1], starts[x] + occurrences_max)):
                q, r = occurrence[at] // k, occurrence[at] % k
                low, high = max(0, r - span), min(k, r + span + 1)
                for i in range(low, high):
                    y = neighbours[q, i]
                    if y == x:
                        continue
                    if weight[y] == 0:
                        touched[touched_count] = <uint32_t>y
                        touched_count += 1
                    weight[y] += discount[y]
            kept = 0
            for at in range(touched_count):
                y = touched[at]
                kept = _keep_best(weight[y], <uint32_t>y, &best[0], &out[x, 0], kept, width)
                weight[y] = 0
            for i in range(kept, width):
                out[x, i] = <uint32_t>x
    return np.asarray(out)


def near_keys(const float[:, ::1] points, const float[::1] half_norms, const uint32_t[::1] order,
              const int64_t[::1] starts, const uint32_t[:, ::1] near_clusters, int64_t width,
              int64_t pool_max):
    """Return for each key its nearest others among the members of the nearest clusters: (m, width).

    `order` lists the keys by cluster, cluster c at starts[c]:starts[c + 1]; row c of
    `near_clusters` begins with c itself. Of a cluster larger than `pool_max` a key looks at that
    many members, from its own rank on. Rows are nearest first, padded with the key itself.
    """
    cdef int64_t m = points.shape[0], d = points.shape[1], c, x, at, i, t, count, size, kept, rank
    cdef int64_t pool_all = near_clusters.shape[1] * pool_max
    cdef uint32_t[:, ::1] out = np.empty((m, width), np.uint32)
    cdef uint32_t[::1] pool = np.empty(pool_all, np.uint32)
    cdef float[::1] affinity = np.empty(pool_all, np.float32)
    cdef float[::1] best = np.empty(width, np.float32)
    cdef float[::1] row = np.empty(d, np.float32)
    with nogil:
        for c in range(near_clusters.shape[0]):
            for at in range(starts[c], starts[c + 1]):
                x = order[at]
                rank = at - starts[c]
                count = 0
                for t in range(near_clusters.shape[1]):
                    i = near_clusters[c, t]
                    size = starts[i + 1] - starts[i]
                    for kept in range(min(size, pool_max)):
                        pool[count] = order[starts[i] + (rank + kept) % size]
                        count += 1
                ob_logits(LEVEL, &points[x, 0], 1, &points[0, 0], OB_FLOAT32, d, &pool[0], count, 1,
                          &row[0], &affinity[0], count)
                kept = 0
                for i in range(count):
                    if pool[i] != x:
                        kept = _keep_best(affinity[i] - half_norms[pool[i]], pool[i], &best[0],
                                          &out[x, 0], kept, width)
                for i in range(kept, width):
                    out[x, i] = <uint32_t>x
    return np.asarray(out)


cdef int64_t _add_edge(uint32_t *row, int64_t size, int64_t cap, uint32_t target) noexcept nogil:
    # Append `target` unless it is there or the row is full; return the new size.
    cdef int64_t i
    if size >= cap:
        return size
    for i in range(size):
        if row[i] == target:
            return size
    row[size] = target
    return size + 1


def link(const uint32_t[:, ::1] wanted, const uint32_t[:, ::1] near, int64_t degree, int64_t spare,
         int64_t wanted_first, int64_t near_first):
    """Return (graph (m, degree), sizes (m,)) with `spare` slots of every row left free.

    Each key takes its first companions and its first near keys; then, rank by rank, whoever names
    a key is linked from it, so that rarely wanted keys are found too; then rows are filled up.
    """
    cdef int64_t m = wanted.shape[0], cap = degree - spare, x, y, r
    cdef uint32_t[:, ::1] graph = np.empty((m, degree), np.uint32)
    cdef int64_t[::1] sizes = np.zeros(m, np.int64)
    with nogil:
        for x in range(m):
            for r in range(min(wanted_first, wanted.shape[1])):
                if wanted[x, r] != x:
                    sizes[x] = _add_edge(&graph[x, 0], sizes[x], cap, wanted[x, r])
            for r in range(min(near_first, near.shape[1])):
                if near[x, r] != x:
                    sizes[x] = _add_edge(&graph[x, 0], sizes[x], cap, near[x, r])
        for r in range(wanted.shape[1]):
            for x in range(m):
                y = wanted[x, r]
                if y != x:
                    sizes[y] = _add_edge(&graph[y, 0], sizes[y], cap, <uint32_t>x)
        for r in range(near.shape[1]):
            for x in range(m):
                y = near[x, r]
                if y != x:
                    sizes[y] = _add_edge(&graph[y, 0], sizes[y], cap, <uint32_t>x)
        for x in range(m):
            for r in range(wanted.shape[1]):
                if wanted[x, r] != x:
                    sizes[x] = _add_edge(&graph[x, 0], sizes[x], cap, wanted[x, r])
            for r in range(near.shape[1]):
                if near[x, r] != x:
                    sizes[x] = _add_edge(&graph[x, 0], sizes[x], cap, near[x, r])
            for r in range(sizes[x], degree):
                graph[x, r] = <uint32_t>x
    return np.asarray(graph), np.asarray(sizes)


cdef int64_t _flood(const uint32_t[:, ::1] graph, uint32_t start, uint8_t *reached,
                    uint32_t *found, int64_t count) noexcept nogil:
    # Breadth first from `start`, which is new; found[:count] grows by what is reached.
    cdef int64_t at = count, r
    cdef uint32_t key
    reached[start] = 1
    found[count] = start
    count += 1
    while at < count:
        for r in range(graph.shape[1]):
            key = graph[found[at], r]
            if not reached[key]:
                reached[key] = 1
                found[count] = key
                count += 1
        at += 1
    return count


def repair(uint32_t[:, ::1] graph, int64_t[::1] sizes, const uint32_t[:, ::1] near, uint32_t entry):
    """Link every key that `entry` does not reach from one that it does; return how many.

    Prefers the nearest reached key with a free slot; needs one free slot per row. Changes `graph`
    and `sizes` in place.
    """
    cdef int64_t m = graph.shape[0], degree = graph.shape[1], count = 0, x, r, host, roomy = 0
    cdef int64_t repaired = 0
    cdef uint8_t[::1] reached = np.zeros(m, np.uint8)
    cdef uint32_t[::1] found = np.empty(m, np.uint32)
    with nogil:
        count = _flood(graph, entry, &reached[0], &found[0], 0)
        for x in range(m):
            if reached[x]:
                continue
            host = -1
            for r in range(near.shape[1]):
                if reached[near[x, r]] and sizes[near[x, r]] < degree:
                    host = near[x, r]
                    break
            if host < 0:
                # Each new key brings free slots of its own, so the oldest with room exists.
                while sizes[found[roomy]] >= degree:
                    roomy += 1
                host = found[roomy]
            graph[host, sizes[host]] = <uint32_t>x
            sizes[host] += 1
            repaired += 1
            count = _flood(graph, <uint32_t>x, &reached[0], &found[0], count)
    return repaired


def reachable(const uint32_t[:, ::1] graph, uint32_t entry):
    """Return how many keys can be reached from `entry`, itself included."""
    cdef int64_t m = graph.shape[0], count
    cdef uint8_t[::1] reached = np.zeros(m, np.uint8)
    cdef uint32_t[::1] found = np.empty(m, np.uint32)
    with nogil:
        count = _flood(graph, entry, &reached[0], &found[0], 0)
    return count


def group_sums(const float[:, ::1] rows, const int64_t[::1] cluster_of, int64_t count):
    """Sum rows (m, d) by cluster in double precision, in their order: (count, d) float32."""
    cdef int64_t m = rows.shape[0], d = rows.shape[1], i, j
    cdef double[:, ::1] sums = np.zeros((count, d))
    cdef double *row
    with nogil:
        for i in range(m):
            row = &sums[cluster_of[i], 0]
            for j in range(d):
                row[j] += rows[i, j]
    return np.asarray(sums).astype(np.float32)


cdef void _words(const float[:, ::1] codebook, float *words) noexcept nogil:
    # What ob_cells compares with: (3, 16) of one pair's codewords (16, 2).
    cdef int64_t c
    cdef float x, y
    for c in range(16):
        x, y = codebook[c, 0], codebook[c, 1]
        words[c], words[16 + c], words[32 + c] = x, y, (x * x + y * y) / 2


def train(const float[:, :, ::1] pairs, float[:, :, ::1] codebook, int64_t steps):
    """Move codewords (p, 16, 2), in place, to the means of the points nearest them, `steps` times.

    `pairs` (p, 2, s) of s points. A codeword that is nearest to none stays.
    """
    cdef int64_t count = pairs.shape[2], j, i, c, step
    cdef int32_t[::1] cells = np.empty(count, np.int32)
    cdef float words[48]
    cdef double sums[16][2]
    cdef int64_t held[16]
    with nogil:
        for j in range(pairs.shape[0]):
            for step in range(steps):
                _words(codebook[j], words)
                ob_cells(&pairs[j, 0, 0], &pairs[j, 1, 0], count, words, &cells[0])
                for c in range(16):
                    sums[c][0] = sums[c][1] = 0
                    held[c] = 0
                for i in range(count):
                    c = cells[i]
                    sums[c][0] += pairs[j, 0, i]
                    sums[c][1] += pairs[j, 1, i]
                    held[c] += 1
                for c in range(16):
                    if held[c]:
                        codebook[j, c, 0] = <float>(sums[c][0] / held[c])
                        codebook[j, c, 1] = <float>(sums[c][1] / held[c])


def encode(const float[:, :, ::1] pairs, const float[:, :, ::1] codebook):
    """Code points (p, 2, m) by the nearest codewords of `codebook` (p, 16, 2), the lower on a tie.

    Returns blocks of sixteen points, (⌈m / 16⌉, ⌈p / 4⌉, 32): see codes.h.
    """
    cdef int64_t p = pairs.shape[0], m = pairs.shape[2], i, j, place
    cdef uint8_t[:, :, ::1] codes = np.zeros(((m + 15) // 16, (p + 3) // 4, 32), np.uint8)
    cdef int32_t[::1] cells = np.empty(m, np.int32)
    cdef float words[48]
    with nogil:
        for j in range(p):
            place = j % 4
            _words(codebook[j], words)
            ob_cells(&pairs[j, 0, 0], &pairs[j, 1, 0], m, words, &cells[0])
            for i in range(m):
                codes[i // 16, j // 4, i % 16 + 16 * (place % 2)] |= <uint8_t>(
                    cells[i] << 4 * (place // 2))
    return np.asarray(codes)
