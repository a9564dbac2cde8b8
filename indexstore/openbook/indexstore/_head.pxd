"""One KV head's arrays as the kernels see them: plain pointers, borrowed from a HeadIndex."""

cimport numpy as cnp
from libc.stdint cimport int8_t, int64_t, uint32_t


cdef struct Head:
    const void *keys
    const void *values
    const int8_t *keys_int8
    const float *scale
    const uint32_t *graph
    const uint32_t *entries
    const float *centroids
    const uint32_t *counts
    const float *value_sums
    const uint32_t *cluster_of
    const float *spreads
    const float *centre
    int dtype
    int64_t m, d, dv, degree, clusters


cdef inline Head borrow(object index):
    # head.HeadIndex has checked dtypes, shapes and contiguity.
    cdef Head head
    head.dtype = {"e": 0, "H": 1, "f": 2}[index.keys.dtype.char]
    head.keys = cnp.PyArray_DATA(index.keys)
    head.values = cnp.PyArray_DATA(index.values)
    head.keys_int8 = <const int8_t *>cnp.PyArray_DATA(index.keys_int8)
    head.scale = <const float *>cnp.PyArray_DATA(index.scale)
    head.graph = <const uint32_t *>cnp.PyArray_DATA(index.graph)
    head.entries = <const uint32_t *>cnp.PyArray_DATA(index.entries)
    head.centroids = <const float *>cnp.PyArray_DATA(index.centroids)
    head.counts = <const uint32_t *>cnp.PyArray_DATA(index.counts)
    head.value_sums = <const float *>cnp.PyArray_DATA(index.value_sums)
    head.cluster_of = <const uint32_t *>cnp.PyArray_DATA(index.cluster_of)
    head.spreads = <const float *>cnp.PyArray_DATA(index.spreads)
    head.centre = <const float *>cnp.PyArray_DATA(index.centre)
    head.m, head.d = index.keys.shape
    head.dv = index.values.shape[1]
    head.degree = index.graph.shape[1]
    head.clusters = index.counts.shape[0]
    return head
