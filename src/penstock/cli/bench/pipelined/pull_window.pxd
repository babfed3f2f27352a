cimport cython
from penstock.cli.bench.pipelined.load_recorder cimport LoadRecorder
from penstock.cli.bench.pipelined.request_window cimport RequestWindow
from penstock.wire cimport layout, octets
from penstock.wire.frame cimport Request

cdef int _SUCCESS
cdef int _NOT_FOUND
cdef int _OFFSET_MOVED

cdef class PullWindow(RequestWindow):
    cdef public long long stop_ns
    cdef readonly int open
    cdef bint _verify
    cdef long long[::1] _offsets
    cdef long long[::1] _ends
    cdef int[::1] _idle
    cdef int _idle_first
    cdef int _idle_count

    @cython.locals(queue=int, going_on=bint)
    cpdef int fill(self, long long now_ns, long long now_ms) except -1
    cdef int _add_idle(self, int queue) except -1
    @cython.locals(request=Request, code=int, queue=int, offset="long long", known=bint,
                   following="long long")
    cdef int _answered(self, int slot, long long now_ns) except -1
    @cython.locals(buffer="unsigned char[::1]", messages="long long", byte_count="long long",
                   size=int, magic=int, body_at="Py_ssize_t", length=int, crc=int)
    cdef int _count_records(self, Py_ssize_t at, Py_ssize_t end, long long now_ns) except -1
