"""A search of one KV head by its clusters, for the modules that attend to what it finds."""

from libc.stdint cimport int16_t, int64_t, uint8_t, uint16_t, uint32_t

from openbook.indexstore._estimate cimport Weights
from openbook.indexstore._head cimport Head


cdef struct Probe:
    # One query head's search: what it makes of the clusters and of the codes, in integers.
    uint8_t *tables  # (4 * quads, 16)
    int16_t *bases  # (clusters in whole sixteens,) the centroid's score; 0 is the best one's
    int16_t *bounds  # (the same,) what a key of the cluster may come to
    int64_t *places  # (clusters + 1,) of each cluster's first key
    uint32_t *blocks  # (blocks,) that were looked at, or are to be
    uint32_t *owners  # (blocks,) a cluster of which each of them has keys
    int16_t *sums  # (blocks, 16) of the keys of each of them
    uint16_t *tied  # (all blocks + 4,) the keys whose sum is the bar, a bit each
    uint16_t *stamps  # (all blocks,) the query head that looked at each last, from 1; 0: none did
    uint32_t *bins  # (BINS,)


cdef struct Search:
    # All that one search needs, laid out in one block of memory.
    Probe probe
    Weights weights
    int64_t group, k, stride, mask_bytes, scored
    int64_t capacity  # keys scored exactly for each query head, at most m
    int64_t *packed  # (stride,)
    int64_t *spare  # (stride,)
    float *raw  # (4 * quads * 16,)
    float *turned  # (group, 2 * pairs) the queries in the directions of the codes
    float *centroid_logits  # (group, c)
    float *logits  # (group, stride)
    float *lifts  # (group,)
    uint32_t *pool  # (stride,) the candidates of all, then the keys read
    uint32_t *top  # (group, k)
    uint8_t *visited  # (mask_bytes + 8,)


cpdef int64_t candidates_of(int64_t queue, int64_t keys) noexcept nogil
cdef int64_t lay_out(Head *head, int64_t group, int64_t wanted, int64_t candidates, char *block,
                     Search *search) noexcept nogil
cdef int64_t find_keys(Head *head, const float *queries, float scaling, float reach, bint ranked,
                       bint all_scored, Search *search) noexcept nogil
cdef char *room(list workspace, int64_t number, int64_t size) except NULL
cdef object copied(const void *numbers, tuple shape, object dtype)
