"""The candidates of a search, each a score and an id in one number that sorts as both should.

All searches end alike: the union of what their query heads found, scored exactly, and where only
the best are wanted each one's best of it.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

cdef extern from "kernels.h" nogil:
    int64_t ob_lowest_bit(uint64_t word)

cdef extern from "int8.h" nogil:
    void ob_keep_scores(int64_t *numbers, int64_t count, int64_t keep, int64_t *spare)
    void ob_sort(int64_t *numbers, int64_t count)


cdef inline int64_t pack(int32_t score, uint32_t key) noexcept nogil:
    # Larger is better: score first, then the smaller id. Bit 0 says that the key was expanded.
    return <int64_t>score * 4294967296LL + (<int64_t>(0x7fffffffu - key) << 1)


cdef inline uint32_t key_of(int64_t packed) noexcept nogil:
    return 0x7fffffffu - (<uint32_t>packed >> 1)


cdef inline int32_t ordered(float value) noexcept nogil:
    # Map floats to integers that compare alike.
    cdef int32_t bits
    memcpy(&bits, &value, sizeof(bits))
    return bits if bits >= 0 else bits ^ 0x7fffffff


cdef inline void insert(int64_t packed, int64_t *row, int64_t *size, int64_t *cursor,
                        int64_t capacity) noexcept nogil:
    # Insert into a descending row of at most `capacity`; the worst falls off.
    cdef int64_t low = 0, high = size[0], middle
    if high == capacity:
        if capacity == 0 or packed <= row[capacity - 1]:
            return
    while low < high:
        middle = (low + high) >> 1
        if row[middle] > packed:
            low = middle + 1
        else:
            high = middle
    if size[0] < capacity:
        size[0] += 1
    memmove(row + low + 1, row + low, (size[0] - 1 - low) * sizeof(int64_t))
    row[low] = packed
    if low < cursor[0]:
        cursor[0] = low


cdef struct Found:
    # What a search leaves behind: per query head its best packed candidates, at most `capacity`.
    # A walk keeps them best first; the other searches in any order, with room for more meanwhile.
    int64_t capacity
    int64_t room
    int64_t *packed  # (group, room)
    int64_t *sizes  # (group,)
    int64_t *cursors  # (group,) of a walk: nothing before it is unexpanded
    int32_t *bars  # (group,) of the others: no key below it is among the best
    int64_t scored
    int64_t *spare  # (room,)


cdef inline void keep_best(Found *found, int64_t g) noexcept nogil:
    # Drop all but the best candidates of a query head, and raise its bar to the worst of them.
    cdef int64_t j
    cdef int64_t *row = found.packed + g * found.room
    if found.sizes[g] > found.capacity:
        ob_keep_scores(row, found.sizes[g], found.capacity, found.spare)
        found.sizes[g] = found.capacity
    if found.sizes[g] == found.capacity > 0:
        found.bars[g] = <int32_t>(row[0] >> 32)
        for j in range(1, found.capacity):
            found.bars[g] = min(found.bars[g], <int32_t>(row[j] >> 32))


cdef inline int64_t marked(const uint8_t *visited, int64_t bytes_, uint32_t *ids) noexcept nogil:
    # The ids whose bits are set, rising. Whole words are read: `visited` ends seven zeros later.
    cdef int64_t byte, count = 0
    cdef uint64_t word
    for byte in range(0, bytes_, 8):
        memcpy(&word, visited + byte, 8)
        while word:
            ids[count] = <uint32_t>(byte * 8 + ob_lowest_bit(word))
            count += 1
            word &= word - 1
    return count


cdef inline int64_t union_of(Found *found, int64_t group, uint8_t *visited, int64_t bytes_,
                             uint32_t *ids) noexcept nogil:
    # The distinct candidates of all query heads, in the order of their ids.
    cdef int64_t g, i
    cdef uint32_t key
    memset(visited, 0, bytes_ + 7)
    for g in range(group):
        for i in range(found.sizes[g]):
            key = key_of(found.packed[g * found.room + i])
            visited[key >> 3] |= <uint8_t>(1 << (key & 7))
    return marked(visited, bytes_, ids)


cdef inline void choose(int64_t group, int64_t k, const float *logits, int64_t stride,
                        const uint32_t *pool, int64_t pool_size, int64_t *row, int64_t *spare,
                        uint32_t *top, uint8_t *visited, int64_t bytes_) noexcept nogil:
    # Mark each query head's best k of the pool by exact logit, and write them to `top`, best
    # first, unless that is NULL. `row` and `spare` have room for the pool.
    cdef int64_t g, i
    cdef uint32_t key
    memset(visited, 0, bytes_)
    for g in range(group):
        for i in range(pool_size):
            row[i] = pack(ordered(logits[g * stride + i]), pool[i])
        ob_keep_scores(row, pool_size, k, spare)
        if top != NULL:
            ob_sort(row, k)
            for i in range(k):
                top[g * k + i] = key_of(row[i])
        for i in range(k):
            key = key_of(row[i])
            visited[key >> 3] |= <uint8_t>(1 << (key & 7))


cdef inline int64_t shrink(int64_t group, float *logits, int64_t stride, uint32_t *pool,
                           int64_t pool_size, const uint8_t *visited) noexcept nogil:
    # Drop what is not marked from the pool and its logits; returns what is left.
    cdef int64_t g, i, kept = 0
    cdef uint32_t key
    for i in range(pool_size):
        key = pool[i]
        if visited[key >> 3] & (1 << (key & 7)):
            pool[kept] = key
            for g in range(group):
                logits[g * stride + kept] = logits[g * stride + i]
            kept += 1
    return kept
