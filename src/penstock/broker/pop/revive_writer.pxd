cimport cython
from penstock.broker.pop.checkpoints cimport PopCheckpoint, PopCheckpoints
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.store.put cimport StoreWriter
from penstock.wire cimport octets
from penstock.wire.output cimport Output
from penstock.wire.record cimport Record

cdef long long _NO_OFFSET
cdef int _PUT_OK
cdef int _ILLEGAL
cdef bytes _NEXT
cdef bytes _DELIVER
cdef Py_ssize_t _NUMBER_BYTES

cdef class ReviveWriter:
    cdef StoreWriter _writer
    cdef list _queues
    cdef PopCheckpoints _checkpoints
    cdef bytes _broker_name
    cdef readonly list read_to
    cdef public long long flush_to
    cdef readonly object written
    cdef Output _text
    cdef Record _record

    cpdef int add(self, PopCheckpoint checkpoint, long long now_ms,
                  long long next_offset=*) except -1
    @cython.locals(several=bint, index=int, first=bint, queue_id=int)
    cpdef int ack(self, PopCheckpoint checkpoint, long long bits, long long now_ms) except -1
    @cython.locals(several=bint)
    cpdef int write_acks(self, object key, int queue_id, list offsets, long long now_ms) except -1
    @cython.locals(acked="long long", index=int, start_offset="long long", pop_ms="long long",
                   queue_id=int)
    cpdef int write_checkpoint(self, PopCheckpoint checkpoint, long long now_ms,
                               long long next_offset=*) except -1
    cpdef long long write(self, bytes body, str tag, int queue_id, long long now_ms) except -1
    cdef int _begin(self, int queue_id, bytes tags, long long deliver_ms) except -1
    @cython.locals(record=Record, queue=ConsumeQueue)
    cdef int _put_tag(self, int queue_id, bytes tags) except -1
    @cython.locals(record=Record)
    cdef int _put_deliver_ms(self, long long deliver_ms) except -1
    @cython.locals(ordinary_id=int, start_offset="long long", pop_ms="long long")
    cdef int _end_ack(self, object key, int queue_id, long long now_ms) except -1
    @cython.locals(record=Record, writer=StoreWriter, queue=ConsumeQueue, status=int)
    cdef int _write(self, int queue_id, long long now_ms) except -1
    cdef int _refuse(self, int status) except -1
    @cython.locals(output=Output)
    cdef int _put(self, bytes text) except -1
    @cython.locals(output=Output)
    cdef int _put_number(self, long long number) except -1
