"""One KV head's arrays as the kernels see them: plain pointers, borrowed from a HeadIndex.

And a layer's heads with their plans, borrowed from a LayerIndex.
"""

from libc.stdint cimport int8_t, int64_t, uint8_t, uint32_t


cdef struct Head:
    const void *keys
    const void *values
    const uint32_t *counts
    const void *value_sums
    const uint32_t *cluster_of
    const float *spreads
    const void *centroids
    # NULL in a head of format 1:
    const uint8_t *codes
    const float *codebook
    const float *code_basis
    const float *code_spreads
    # NULL in a head without a graph:
    const int8_t *keys_int8
    const float *centre
    const float *scale
    const uint32_t *graph
    const uint32_t *entries
    int dtype, centroid_dtype, sum_dtype
    int64_t m, d, dv, clusters, quads, degree


cdef class Borrowed:
    cdef Head head


cdef inline Head borrow(object index):
    # The pointers of a HeadIndex, which has checked its arrays and keeps them. Raises TypeError.
    return (<Borrowed?>index.borrowed).head


cdef struct Planned:
    # A KV head, and how it is searched by its clusters.
    Head head
    int64_t queue
    float reach
    const float *lift  # (group,) or NULL


cdef class BorrowedLayer:
    cdef tuple heads  # their arrays live as long
    cdef object lifts  # the memory of every head's lift
    cdef int64_t count
    cdef Planned *planned  # (count,)
