cimport cython
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.store.put cimport StoreWriter
from penstock.store.consumequeue.queue_table cimport QueueTable
from penstock.store.flusher cimport Flusher
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output
from penstock.wire.record cimport PropertyMarks, Record

cdef int _SEND_MESSAGE
cdef int _SUCCESS
cdef int _FLUSH_DISK_TIMEOUT
cdef int _FLUSH_SLAVE_TIMEOUT
cdef int _PUT_OK
cdef int _ONEWAY
cdef int _PREPARED
cdef int _TRANSACTION_MASK
cdef int _PERCENT

cdef class SendHandler:
    cdef readonly StoreWriter writer
    cdef public object topics
    cdef readonly object redirects
    cdef readonly bytes store_host
    cdef public object unique_ids
    cdef readonly bytes region
    cdef readonly Record record
    cdef readonly bytes extra_properties
    cdef readonly bytes trace_on
    cdef readonly bint sync_flush
    cdef readonly Output pending
    cdef readonly Output flush_timeout
    cdef readonly Output slave_timeout
    cdef readonly bint created
    cdef str _created_topic
    cdef readonly Output creation_reply
    cdef readonly Output creation_timeout
    cdef readonly Output creation_unreplicated
    cdef readonly long long creations
    cdef readonly long long sent
    cdef readonly long long refused
    cdef unsigned char[::1] _buffer
    cdef bint _rewritten
    cdef int _queue_id
    cdef bint _waits
    cdef bytes _recall_handle

    cpdef int bind(self, unsigned char[::1] buffer, bytes born_host) except -1
    cpdef int set_born_host(self, bytes born_host) except -1
    @cython.locals(status=int, record=Record, queue=ConsumeQueue, batch=bint)
    cpdef object handle(self, Request request, Output output, long long client, long long now_ms)
    @cython.locals(record=Record)
    cdef int _answer(self, Request request, Output output, int code, bint batch) except -1
    cdef bint _read_v2(self, Request request) except -1
    cdef bint _read_v1(self, Request request) except -1
    @cython.locals(record=Record)
    cdef int _fill_record(self, Request request, int topic, int properties, int queue_id,
                          int sys_flag, int born, int flag, int reconsumed) except -1
    cdef int _restore_source(self) except -1
