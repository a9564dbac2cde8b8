"""A layer's step by clusters: every KV head is searched and attended to, heads side by side.

Owns the tasks of a call, one a KV head, and what they write; the threads are crew.h's, the search
is _probe.pyx's and the sums are _estimate.pxd's. The numbers do not depend on who does a task. The
loops release the GIL, create no Python objects and never raise; the NumPy twin is reference.attend.
"""

cimport numpy as cnp
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t
from libc.string cimport memset

from openbook.indexstore._estimate cimport combine
from openbook.indexstore._head cimport BorrowedLayer, Head, Planned
from openbook.indexstore._probe cimport Search, candidates_of, copied, find_keys, lay_out, room

import numpy as np

from openbook.indexstore.head import AttendResult

cnp.import_array()

cdef extern from "kernels.h" nogil:
    int ob_best_level()

cdef extern from "crew.h" nogil:
    void ob_crew_run(int threads, int64_t count, void (*task)(void *, int64_t, int) noexcept nogil,
                     void *call)

cdef int LEVEL = ob_best_level()

cdef enum:
    WORKERS_MAX = 256  # threads of one call


cdef struct Task:
    # One KV head of one request.
    Head *head
    const float *queries  # (group, d)
    const float *lift  # (group,) or NULL
    int64_t group, keys, candidates
    double scaling
    float reach, lift_log_max
    bint estimate
    # Written:
    float *out  # (group, dv)
    float *lse  # (group,)
    float *estimated_lse  # (group,)
    int64_t read, scored


cdef struct Call:
    Task *tasks
    char **rooms  # of each worker


cdef void _attend(Task *task, char *block, Search *search) noexcept nogil:
    cdef int64_t g
    cdef float *lifts = NULL
    lay_out(task.head, task.group, task.keys, task.candidates, block, search)
    if task.lift != NULL:
        lifts = search.lifts
        for g in range(task.group):
            lifts[g] = task.lift[g] * <float>(task.scaling * task.scaling)
    task.read = find_keys(task.head, task.queries, <float>task.scaling, task.reach, False,
                          task.estimate, search)
    task.scored = search.scored
    memset(task.out, 0, task.group * task.head.dv * sizeof(float))
    combine(LEVEL, task.head, task.group, search.pool, task.read, search.logits,
            search.centroid_logits, task.estimate, lifts, task.lift_log_max, &search.weights,
            task.out, task.lse, task.estimated_lse)


cdef void _attend_numbered(void *call, int64_t number, int worker) noexcept nogil:
    cdef Search search
    _attend((<Call *>call).tasks + number, (<Call *>call).rooms[worker], &search)


cdef cnp.ndarray _empty(int64_t rows, int64_t columns, bint is_cube):
    # float32 (rows, 1, columns), or (rows, 1)
    cdef cnp.npy_intp[3] shape
    shape[0], shape[1], shape[2] = rows, 1, columns
    return cnp.PyArray_SimpleNew(3 if is_cube else 2, shape, cnp.NPY_FLOAT32)


cdef tuple _enter(object request, BorrowedLayer layer, float lift_log_max, Task *tasks):
    # Write the tasks of a request; returns the arrays that they point into.
    cdef cnp.ndarray queries = request.queries, out, lse, estimated
    cdef int64_t number, group, query_heads, d, dv
    cdef double scaling = request.scaling
    cdef Planned *planned
    cdef Task *task
    budget = request.budget
    cdef int64_t keys = budget.keys
    cdef bint estimate = budget.estimate
    if not cnp.PyArray_IS_C_CONTIGUOUS(queries):
        queries = np.ascontiguousarray(queries)
    query_heads, group = queries.shape[0], queries.shape[0] // layer.count
    d, dv = layer.planned[0].head.d, layer.planned[0].head.dv
    out, lse = _empty(query_heads, dv, True), _empty(query_heads, 1, False)
    estimated = _empty(query_heads, 1, False)
    for number in range(layer.count):
        planned, task = layer.planned + number, tasks + number
        task.head, task.lift, task.reach = &planned.head, planned.lift, planned.reach
        task.queries = <const float *>cnp.PyArray_DATA(queries) + number * group * d
        task.group, task.keys, task.candidates = group, keys, candidates_of(planned.queue, keys)
        task.scaling, task.lift_log_max, task.estimate = scaling, lift_log_max, estimate
        task.out = <float *>cnp.PyArray_DATA(out) + number * group * dv
        task.lse = <float *>cnp.PyArray_DATA(lse) + number * group
        task.estimated_lse = <float *>cnp.PyArray_DATA(estimated) + number * group
    return queries, out, lse, estimated


cdef list _run(Task *tasks, int64_t count, list requests, list workspace, int64_t threads):
    # Do all tasks; returns for each the ids read (r,) and logits (group, r), or without evidence
    # nothing.
    cdef int64_t number, size = 0
    cdef Search search
    cdef Call call
    cdef char *rooms[WORKERS_MAX]
    cdef int workers = <int>min(threads, count, WORKERS_MAX)
    for number in range(count):
        size = max(size, lay_out(tasks[number].head, tasks[number].group, tasks[number].keys,
                                 tasks[number].candidates, NULL, &search))
    for number in range(workers):
        rooms[number] = room(workspace, number, size)
    if not any([request.evidence for request in requests]):
        call.tasks, call.rooms = tasks, rooms
        with nogil:
            ob_crew_run(workers, count, _attend_numbered, &call)
        return []
    found = []
    for number in range(count):
        with nogil:
            _attend(tasks + number, rooms[0], &search)
        found.append((copied(search.pool, (tasks[number].read,), np.uint32),
                      copied(search.logits, (tasks[number].group, tasks[number].read), np.float32)))
    return found


cdef object _result(object request, tuple arrays, int64_t first, Task *tasks, list found):
    # The AttendResult of a request whose tasks begin at `first`.
    cdef int64_t read = 0, scored = 0, centroids = 0, number
    cdef int64_t stop = first + (<BorrowedLayer>request.layer.borrowed).count
    for number in range(first, stop):
        read += tasks[number].read
        scored += tasks[number].scored
        centroids += tasks[number].head.clusters
    ids, logits = [], []
    if request.evidence:
        for head, (places, rows) in zip(request.layer.heads, found[first:stop]):
            ids += [head.places(places)] * len(rows)
            logits.extend(rows)
    return AttendResult(arrays[1], arrays[2], arrays[3], read, scored, centroids,
                        tuple(ids), tuple(logits))


def attend(list requests, list workspace, int64_t threads, float lift_log_max):
    """Answer checked requests whose heads all have `clusters` plans; returns AttendResults.

    `workspace`, empty at first, keeps memory for the calling thread's next call. With evidence of
    any request all heads follow one another.
    """
    cdef int64_t count = 0, at = 0
    cdef Task *tasks
    for request in requests:
        count += (<BorrowedLayer?>request.layer.borrowed).count
    if count == 0:
        return []
    tasks = <Task *>PyMem_Malloc(count * sizeof(Task))
    if tasks == NULL:
        raise MemoryError
    try:
        entered = []
        for request in requests:
            entered.append((at, _enter(request, request.layer.borrowed, lift_log_max, tasks + at)))
            at += (<BorrowedLayer>request.layer.borrowed).count
        found = _run(tasks, count, requests, workspace, threads)
        return [_result(request, arrays, first, tasks, found)
                for request, (first, arrays) in zip(requests, entered)]
    finally:
        PyMem_Free(tasks)
