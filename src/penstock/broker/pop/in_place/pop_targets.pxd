cimport cython
from penstock.broker.consumers.consumer_targets cimport ConsumerTarget, TargetKey, TargetTable
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.wire cimport octets
from penstock.wire.frame cimport Request

cdef bytes _TAG

cdef class PopTopic:
    cdef readonly str name
    cdef readonly bytes name_bytes
    cdef readonly bint retry
    cdef readonly object config
    cdef readonly int queues

cdef class ResolvedPop(ConsumerTarget):
    cdef readonly list topics
    cdef readonly object tag_hashes
    cdef public object settings
    cdef public object group_config

cdef class PopTargets:
    cdef object _polling
    cdef object _store
    cdef object _settings
    cdef object _topics
    cdef object _groups
    cdef object _group_table
    cdef TargetTable _table
    cdef TargetKey _key

    @cython.locals(target=ResolvedPop)
    cpdef ResolvedPop find(self, Request request)
    @cython.locals(topic=PopTopic)
    cpdef bint is_current(self, ResolvedPop target) except -1
    @cython.locals(kind=int, length=int, at=int)
    cdef bint _read_key(self, Request request) except -1
