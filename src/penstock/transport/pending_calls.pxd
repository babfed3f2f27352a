cimport cython
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef Py_ssize_t _CALLS_MAX
cdef Py_ssize_t _BATCH_BYTES_MAX
cdef long long _NEVER_MS
cdef int _RESPONSE

cdef class Call:
    cdef public int code
    cdef public long long timeout_ms
    cdef public long long deadline_ms
    cdef public long long sent_ms
    cdef public long long answered_ms
    cdef public long long reads

    cpdef object answered(self, Request request)
    cpdef object failed(self, object error)

cdef class PendingCalls:
    cdef readonly str address
    cdef public dict pending
    cdef readonly Output output
    cdef readonly Request request
    cdef public long long reads
    cdef public long long alarm_ms
    cdef public bint paused
    cdef public bint flush_scheduled
    cdef public bint has_request
    cdef int _opaque
    cdef object _set_alarm
    cdef object _schedule_flush
    cdef object _flush

    cpdef int next_opaque(self) except -1
    @cython.locals(opaque=int)
    cpdef int expect(self, Call call) except -1
    cpdef int flush_soon(self) except -1
    @cython.locals(request=Request, length="Py_ssize_t", call=Call)
    cpdef Py_ssize_t take_responses(self, Py_ssize_t at, Py_ssize_t end, long long now_ms) except -1
