"""Read the pointers of a HeadIndex, and those of a layer's heads, once for every search of them."""

cimport cython
cimport numpy as cnp
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int8_t, int64_t, uint8_t, uint32_t

import numpy as np

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


@cython.auto_pickle(False)
cdef class BorrowedLayer:
    """The heads of a head.LayerIndex and what their plans say of a search by clusters."""

    def __cinit__(self, tuple heads, tuple plan):
        cdef int64_t number, at = 0
        if len(plan) != len(heads):
            raise ValueError(f"{len(heads)} KV heads but {len(plan)} plans")
        self.heads, self.count = heads, len(heads)
        self.planned = <Planned *>PyMem_Malloc(max(1, self.count) * sizeof(Planned))
        if self.planned == NULL:
            raise MemoryError
        self.lifts = np.array([one for head in plan for one in head.lift], np.float32)
        for number in range(self.count):
            self.planned[number].head = borrow(heads[number])
            self.planned[number].queue = plan[number].queue
            self.planned[number].reach = plan[number].reach
            self.planned[number].lift = NULL
            if plan[number].lift:
                self.planned[number].lift = <const float *>cnp.PyArray_DATA(self.lifts) + at
                at += len(plan[number].lift)

    def __dealloc__(self):
        PyMem_Free(self.planned)
