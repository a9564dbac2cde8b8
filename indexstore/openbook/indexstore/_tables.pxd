"""A query as the codes of a head are asked: turned to their directions, tabulated by codeword.

The NumPy twin is reference_probe.levels.
"""

from libc.math cimport INFINITY, sqrtf
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memset

from openbook.indexstore._head cimport Head

cdef extern from "kernels.h" nogil:
    float ob_dot(const float *a, const float *b, int64_t d)

cdef enum:
    TABLE_MAX = 63  # four entries of a table fit a byte
    SUM_MAX = 16128  # of all entries together; with a base no lower than BASE_MIN all fit 16 bits
    BASE_MIN = -16000


cdef inline float turn(const float *query, Head *head, float scaling,
                       float *turned) noexcept nogil:
    # The query in the directions of the codes; returns how much wider than for the average
    # query the scores of a cluster's keys lie.
    cdef int64_t j, codes = 4 * head.quads
    cdef float wide = 0, one
    for j in range(codes * 2):
        turned[j] = 0
    for j in range(2 * ((head.d + 1) // 2)):
        turned[j] = scaling * ob_dot(head.code_basis + j * head.d, query, head.d)
        one = turned[j] * head.code_spreads[j]
        wide += one * one
    return sqrtf(wide)


cdef inline float tabulate(const float *turned, Head *head, float span, float *raw,
                           uint8_t *tables, float *zero) noexcept nogil:
    # Round what each code adds to a score to a table of small integers; returns units a score.
    # `zero` becomes the sum of a key that lies at its centroid, `span` is that of the centroids.
    cdef int64_t pairs = (head.d + 1) // 2, j, c, most = min(TABLE_MAX, SUM_MAX // (4 * head.quads))
    cdef float widest = 0, low, high, inverse
    cdef const float *codeword = head.codebook
    zero[0] = 0
    for j in range(pairs):
        low = INFINITY
        high = -INFINITY
        for c in range(16):
            raw[j * 16 + c] = turned[2 * j] * codeword[0] + turned[2 * j + 1] * codeword[1]
            low = min(low, raw[j * 16 + c])
            high = max(high, raw[j * 16 + c])
            codeword += 2
        for c in range(16):
            raw[j * 16 + c] -= low
        widest = max(widest, high - low)
        zero[0] -= low
    widest = max(widest / <float>most, span / <float>(-BASE_MIN))
    inverse = <float>1 / widest if widest > 0 else 0
    memset(tables, 0, 4 * head.quads * 16)
    for j in range(pairs * 16):
        tables[j] = <uint8_t>(raw[j] * inverse + <float>0.5)
    zero[0] *= inverse
    return inverse
