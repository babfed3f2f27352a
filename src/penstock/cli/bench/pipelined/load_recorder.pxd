cimport cython
from penstock.cli.bench.histogram cimport LogHistogram

cpdef bint is_stored(int code)

cdef class LoadRecorder:
    cdef readonly long long begin_ns
    cdef readonly long long end_ns
    cdef readonly LogHistogram latency
    cdef readonly LogHistogram behind
    cdef readonly long long messages
    cdef readonly long long byte_count
    cdef readonly long long last_ns
    cdef readonly dict codes
    cdef readonly long long acknowledged
    cdef readonly long long received
    cdef public long long corrupt

    cpdef int set_window(self, long long begin_ns, long long end_ns) except -1
    cpdef int sent(self, long long begin_ns, long long now_ns) except -1
    @cython.locals(stored=bint)
    cpdef int answered(self, int code, long long begin_ns, long long now_ns, long long messages,
                       long long byte_count) except -1
    cpdef int arrived(self, long long now_ns, long long messages, long long byte_count) except -1
    cpdef int count_code(self, int code, long long messages) except -1
