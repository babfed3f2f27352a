cimport cython
from penstock.broker.send cimport SendHandler
from penstock.store.put cimport PutPath
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _SEND_MESSAGE
cdef int _SEND_MESSAGE_V2
cdef int _SEND_BATCH_MESSAGE
cdef int _RESPONSE
cdef int _ONEWAY
cdef int _CREATIONS_MAX

cdef class RequestLoop:
    cdef readonly object service
    cdef readonly PutPath path
    cdef readonly SendHandler send
    cdef readonly object pull
    cdef public object guard
    cdef readonly Request request
    cdef readonly Output output
    cdef public Py_ssize_t output_bytes_max
    cdef public long long client
    cdef public str peer
    cdef readonly long long requests
    cdef readonly dict refusals
    cdef readonly bint full
    cdef public bint busy
    cdef public bint attend
    cdef public list deferred
    cdef public list responses

    cpdef int bind(self, unsigned char[::1] buffer, bytes born_host) except -1
    cpdef int come_from(self, long long client, str peer, bytes born_host) except -1
    @cython.locals(length="Py_ssize_t", request=Request, made="long long")
    cpdef Py_ssize_t serve(self, Py_ssize_t at, Py_ssize_t end, long long now_ms) except -1
