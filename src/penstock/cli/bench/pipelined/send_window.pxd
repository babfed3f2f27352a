cimport cython
from penstock.cli.bench.pipelined.load_recorder cimport LoadRecorder, is_stored
from penstock.cli.bench.pipelined.request_window cimport RequestWindow
from penstock.wire cimport octets

cdef int _ROW
cdef long long _NEVER_NS

cdef class SendWindow(RequestWindow):
    cdef public long long stop_ns
    cdef public long long left
    cdef double _first_ns
    cdef double _interval_ns
    cdef long long _number
    cdef int _batch
    cdef long long _bytes
    cdef int[::1] _id_places
    cdef int _count
    cdef int _next
    cdef long long _id
    cdef long long _born_ms

    cpdef int schedule(self, double first_ns, double interval_ns) except -1
    @cython.locals(due_ns="long long")
    cpdef long long due_ns(self) except -1
    @cython.locals(due_ns="long long")
    cpdef int fill(self, long long now_ns, long long now_ms) except -1
    cdef long long _due_ns(self) except -1
    @cython.locals(template=int)
    cdef int _set_born(self, long long now_ms) except -1
    @cython.locals(template=int, start="Py_ssize_t", place=int, end=int, view="unsigned char[::1]")
    cdef int _send(self, long long begin_ns) except -1
    @cython.locals(code=int, begin_ns="long long")
    cdef int _answered(self, int slot, long long now_ns) except -1
