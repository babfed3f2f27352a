cimport cython
from penstock.store.put cimport PutPath
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output
from penstock.wire.record cimport Record

cdef int _SEND_MESSAGE_V2
cdef int _SUCCESS
cdef int _PUT_OK

cdef class SendHandler:
    cdef readonly PutPath path
    cdef readonly bytes store_host
    cdef readonly Record record
    cdef readonly long long sent
    cdef readonly long long refused

    cpdef int bind(self, unsigned char[::1] buffer, bytes born_host) except -1
    @cython.locals(status=int)
    cpdef int handle(self, Request request, Output output, long long now_ms) except -1
    cdef int _answer(self, Request request, Output output) except -1
    cdef int _read_letters(self, Request request) except -1
    cdef int _read_names(self, Request request) except -1
    @cython.locals(record=Record)
    cdef int _take(self, Request request, int topic, int properties, int queue_id, int sys_flag,
                   int born, int flag, int reconsumed) except -1
