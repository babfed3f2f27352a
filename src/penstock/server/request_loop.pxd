cimport cython
from penstock.broker.send cimport SendHandler
from penstock.store.put cimport StoreWriter
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _FAST_CODES
cdef int _RESPONSE
cdef int _ONEWAY
cdef int _CREATIONS_MAX
cdef long long _SLICE_NS

cdef class RequestLoop:
    cdef readonly object service
    cdef readonly object access
    cdef object _time_ns
    cdef readonly dict in_place
    cdef readonly SendHandler send
    cdef const unsigned char[::1] _send_codes
    cdef readonly StoreWriter writer
    cdef readonly Request request
    cdef readonly Output output
    cdef public Py_ssize_t output_bytes_max
    cdef readonly long long client
    cdef readonly str peer
    cdef readonly long long requests
    cdef readonly dict refusals
    cdef readonly bint stopped_early
    cdef public bint overloaded
    cdef public bint arrivals
    cdef public list deferred
    cdef public list responses

    cpdef int bind(self, unsigned char[::1] buffer, bytes born_host) except -1
    cpdef int set_client(self, long long client, str peer, bytes born_host) except -1
    @cython.locals(length="Py_ssize_t", request=Request, created="long long",
                   stop_ns="long long", timed=bint)
    cpdef Py_ssize_t serve(self, Py_ssize_t at, Py_ssize_t end, long long now_ms) except -1
