cimport cython
from penstock.cli.bench.pipelined.load_recorder cimport LoadRecorder
from penstock.wire cimport octets
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _OPAQUE_FIRST
cdef int _ROW
cdef int _RESPONSE

cdef class RequestWindow:
    cdef readonly LoadRecorder recorder
    cdef readonly Output output
    cdef readonly Request request
    cdef readonly int size
    cdef readonly int in_flight
    cdef readonly int withheld
    cdef unsigned char[::1] _data
    cdef int[::1] _rows
    cdef bint _is_json
    cdef int _number_width
    cdef long long[::1] _begins
    cdef int[::1] _templates
    cdef int[::1] _free
    cdef int _free_count

    cpdef int bind(self, unsigned char[::1] buffer) except -1
    cpdef int fill(self, long long now_ns, long long now_ms) except -1
    cpdef Py_ssize_t missing(self)
    cpdef int release_withheld(self) except -1
    @cython.locals(request=Request, length="Py_ssize_t")
    cpdef Py_ssize_t take(self, Py_ssize_t at, Py_ssize_t end, long long now_ns) except -1
    @cython.locals(slot=int)
    cdef int _slot_of(self, int opaque) except -1
    cdef int _answered(self, int slot, long long now_ns) except -1
    cdef int _release(self, int slot, bint refused) except -1
    @cython.locals(at="Py_ssize_t", place="Py_ssize_t")
    cdef int _put_number(self, int template, long long value) except -1
    @cython.locals(slot=int, row=int, length="Py_ssize_t", output=Output, start="Py_ssize_t",
                   at="Py_ssize_t")
    cdef Py_ssize_t _put_frame(self, int template, long long begin_ns) except -1
