cimport cython
from penstock.broker.consumers.offset_commits cimport OffsetCommits
from penstock.broker.pull.pull_handler cimport PullHandler
from penstock.broker.send cimport SendHandler
from penstock.store.put cimport StoreWriter
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _FAST_CODES
cdef int _SEND
cdef int _PULL
cdef int _COMMIT
cdef int _BINARY
cdef int _SUCCESS
cdef int _RESPONSE
cdef int _ONEWAY
cdef int _CREATIONS_MAX
cdef int _SEND_V1
cdef int _SEND_V2
cdef int _RPC_WIDTH
cdef int _RPC_BUCKETS
cdef int _APPEND_BUCKETS
cdef long long _SLICE_NS

cdef class RequestLoop:
    cdef readonly object service
    cdef readonly object access
    cdef object _time_ns
    cdef readonly dict in_place
    cdef readonly SendHandler send
    cdef readonly PullHandler pull
    cdef readonly OffsetCommits commits
    cdef const unsigned char[::1] _kinds
    cdef dict _in_place_cut
    cdef readonly StoreWriter writer
    cdef readonly Request request
    cdef readonly Output output
    cdef public Py_ssize_t output_bytes_max
    cdef readonly long long client
    cdef readonly str peer
    cdef readonly long long requests
    cdef readonly dict refusals
    cdef readonly long long sends_v1
    cdef readonly long long sends_v2
    cdef readonly long long sends_batch
    cdef public dict answered
    cdef readonly long long[::1] send_times
    cdef readonly long long[::1] append_times
    cdef long long[::1] _rpc_bounds
    cdef long long[::1] _append_bounds
    cdef readonly bint stopped_early
    cdef public bint overloaded
    cdef public bint arrivals
    cdef public list deferred
    cdef public list responses

    cpdef int bind(self, unsigned char[::1] buffer, bytes born_host) except -1
    cpdef int set_client(self, long long client, str peer, bytes born_host) except -1
    @cython.locals(length="Py_ssize_t", request=Request, created="long long",
                   stop_ns="long long", timed=bint, open_to_all=bint, kind=int)
    cpdef Py_ssize_t serve(self, Py_ssize_t at, Py_ssize_t end, long long now_ms) except -1
    @cython.locals(sends="long long", average_ns="long long", bucket="Py_ssize_t")
    cpdef int finish_read(self, long long took_ns) except -1
    @cython.locals(bucket="Py_ssize_t", times="long long[::1]")
    cpdef int count_sends(self, long long v1, long long v2, long long batch,
                          long long took_ns) except -1
    cdef int _count_send(self, int code) except -1
    @cython.locals(key="long long")
    cdef int _note(self, long long response_code) except -1
    @cython.locals(before="Py_ssize_t")
    cdef int _serve_in_place(self, int kind, long long now_ms) except -1
