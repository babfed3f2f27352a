cimport cython
from penstock.broker.consumers.consumer_targets cimport ConsumerTarget, TargetKey, TargetTable
from penstock.store.put cimport StoreWriter
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _SUCCESS
cdef int _ONEWAY
cdef long long _INT_MAX
cdef long long _INVISIBLE_MS_MAX
cdef int _ORDERED
cdef int _HANDLE_BYTES_MAX
cdef int _DIGITS_MAX
cdef int _SPACE
cdef int _ZERO
cdef int _TWO

cdef class ReceiptReader:
    cdef readonly long long start_offset
    cdef readonly long long pop_ms
    cdef readonly long long invisible_ms
    cdef readonly long long revive_queue_id
    cdef int _at
    cdef int _end

    @cython.locals(at=int)
    cpdef bint read(self, unsigned char[::1] buffer, int at, int length) except -1
    @cython.locals(at=int, start=int, value="long long")
    cdef long long _number(self, unsigned char[::1] buffer) noexcept

cdef class AckTarget(ConsumerTarget):
    cdef public object topic_config

cdef class ReceiptRequests:
    cdef object _acks
    cdef object _by_rules
    cdef object _set_time
    cdef object _role
    cdef object _store
    cdef StoreWriter _writer
    cdef object _topics
    cdef TargetTable _table
    cdef TargetKey _key
    cdef AckTarget _target
    cdef ReceiptReader _receipt
    cdef long long _offset
    cdef long long _invisible_ms

    cdef bint _read(self, Request request) except -1
    @cython.locals(field=int, offset=int, receipt=int, at=int, length=int, target=AckTarget)
    cdef bint _read_fields(self, Request request) except -1
    @cython.locals(target=AckTarget, receipt=ReceiptReader)
    cdef object _checkpoint_key(self)
    cdef object _resolve(self, Request request, long long client, long long now_ms)

cdef class AckHandler(ReceiptRequests):
    @cython.locals(target=AckTarget, receipt=ReceiptReader)
    cpdef object handle(self, Request request, Output output, long long client, long long now_ms)

cdef class InvisibleTimeHandler(ReceiptRequests):
    @cython.locals(target=AckTarget, receipt=ReceiptReader, invisible_ms="long long",
                   end="long long", pop_ms="long long")
    cpdef object handle(self, Request request, Output output, long long client, long long now_ms)
