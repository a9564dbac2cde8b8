"""One KV head's arrays as the kernels see them: plain pointers, borrowed from a HeadIndex."""

cimport numpy as cnp
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


cdef inline const void *_data(object array) noexcept:
    return NULL if array is None else cnp.PyArray_DATA(array)


cdef inline Head borrow(object index):
    # head.HeadIndex has checked dtypes, shapes and contiguity.
    cdef Head head
    cdef dict numbers = {"e": 0, "H": 1, "f": 2}
    head.dtype = numbers[index.keys.dtype.char]
    head.centroid_dtype = numbers[index.centroids.dtype.char]
    head.sum_dtype = numbers[index.value_sums.dtype.char]
    head.keys = _data(index.keys)
    head.values = _data(index.values)
    head.counts = <const uint32_t *>_data(index.counts)
    head.value_sums = _data(index.value_sums)
    head.cluster_of = <const uint32_t *>_data(index.cluster_of)
    head.spreads = <const float *>_data(index.spreads)
    head.centroids = _data(index.centroids)
    head.codes = <const uint8_t *>_data(index.codes)
    head.codebook = <const float *>_data(index.codebook)
    head.code_basis = <const float *>_data(index.code_basis)
    head.code_spreads = <const float *>_data(index.code_spreads)
    head.keys_int8 = <const int8_t *>_data(index.keys_int8)
    head.centre = <const float *>_data(index.centre)
    head.scale = <const float *>_data(index.scale)
    head.graph = <const uint32_t *>_data(index.graph)
    head.entries = <const uint32_t *>_data(index.entries)
    head.m, head.d = index.keys.shape
    head.dv = index.values.shape[1]
    head.clusters = index.counts.shape[0]
    head.quads = 0 if index.codes is None else index.codes.shape[1]
    head.degree = 0 if index.graph is None else index.graph.shape[1]
    return head
