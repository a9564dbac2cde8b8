"""Read the pointers of a HeadIndex once, for every search of it."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int8_t, uint8_t, uint32_t

cnp.import_array()


cdef const void *_data(object array) except? NULL:
    return NULL if array is None else cnp.PyArray_DATA(array)


@cython.auto_pickle(False)
cdef class Borrowed:
    """Where the arrays of one HeadIndex lie: good for as long as that lives, which holds this."""

    def __cinit__(self, object index):
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
        self.head = head
