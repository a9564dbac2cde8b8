"""A candidate of a search: a score and an id in one number that sorts as both should."""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy, memmove


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
