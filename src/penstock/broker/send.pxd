cimport cython
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.store.put cimport PutPath
from penstock.store.consumequeue.queue_table cimport QueueTable
from penstock.store.flusher cimport Flusher
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output
from penstock.wire.record cimport PropertyMarks, Record

cdef int _SEND_MESSAGE
cdef int _SUCCESS
cdef int _FLUSH_DISK_TIMEOUT
cdef int _PUT_OK
cdef int _ONEWAY
cdef int _PREPARED
cdef int _TRANSACTION_MASK
cdef int _PERCENT

cdef class SendHandler:
    cdef readonly PutPath path
    cdef public object gate
    cdef public object redirects
    cdef readonly bytes store_host
    cdef readonly Record record
    cdef public bytes extra
    cdef public bytes region
    cdef public bint trace_off
    cdef public object unique_ids
    cdef readonly bint waits
    cdef readonly Output waiting
    cdef readonly Output late
    cdef readonly bint created
    cdef readonly long long creations
    cdef str _created_topic
    cdef readonly Output fresh
    cdef readonly Output fresh_late
    cdef readonly long long sent
    cdef readonly long long refused
    cdef unsigned char[::1] _buffer
    cdef bint _moved
    cdef int _queue_id
    cdef bint _wait
    cdef bytes _recall

    cpdef int bind(self, unsigned char[::1] buffer, bytes born_host) except -1
    cpdef int come_from(self, bytes born_host) except -1
    @cython.locals(status=int, record=Record, queue=ConsumeQueue, batch=bint)
    cpdef int handle(self, Request request, Output output, long long now_ms) except -1
    @cython.locals(record=Record)
    cdef int _answer(self, Request request, Output output, int code, bint batch) except -1
    cdef bint _read_letters(self, Request request) except -1
    cdef bint _read_names(self, Request request) except -1
    @cython.locals(record=Record)
    cdef int _take(self, Request request, int topic, int properties, int queue_id, int sys_flag,
                   int born, int flag, int reconsumed) except -1
    cdef int _return(self) except -1
