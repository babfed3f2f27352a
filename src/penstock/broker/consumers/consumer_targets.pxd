cimport cython
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.wire cimport octets
from penstock.wire.fields cimport Fields

cdef int _NO_EXPRESSION
cdef int _ALL_QUEUES
cdef int _EXPRESSION_BYTES_MAX
cdef int _PROBES

cdef class TargetKey:
    cdef readonly Fields fields
    cdef readonly int group_at
    cdef readonly int group_length
    cdef readonly int topic_at
    cdef readonly int topic_length
    cdef readonly int expression_at
    cdef readonly int expression_length
    cdef readonly int queue_id
    cdef readonly unsigned int hash

    @cython.locals(group=int, topic=int, queue=int, expression=int, queue_id="long long",
                   lowest=int)
    cpdef bint read(self, Fields fields, bytes expression_name, bint all_queues=*) except -1

cdef class ConsumerTarget:
    cdef readonly unsigned int hash
    cdef readonly bytes group_name
    cdef readonly bytes topic_name
    cdef readonly bytes expression
    cdef readonly bint with_expression
    cdef readonly int queue_id
    cdef readonly str group
    cdef readonly str topic
    cdef readonly ConsumeQueue queue

    @cython.locals(buffer="unsigned char[::1]")
    cpdef bint has_key(self, TargetKey key) except -1

cdef class TargetTable:
    cdef long long _slots_max
    cdef list _slots
    cdef unsigned int _mask
    cdef readonly long long used

    @cython.locals(target=ConsumerTarget, probe="unsigned int")
    cpdef ConsumerTarget find(self, TargetKey key)
