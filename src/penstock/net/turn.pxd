cimport cython
from penstock.broker.send cimport SendHandler
from penstock.store.put cimport PutPath
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _SEND_MESSAGE
cdef int _SEND_MESSAGE_V2

cdef class Turn:
    cdef readonly PutPath path
    cdef readonly SendHandler send
    cdef readonly Request request
    cdef readonly Output output

    cpdef int bind(self, unsigned char[::1] buffer, bytes born_host) except -1
    @cython.locals(length="Py_ssize_t", request=Request)
    cpdef Py_ssize_t serve(self, Py_ssize_t at, Py_ssize_t end, long long now_ms) except -1
