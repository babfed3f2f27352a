cimport cython
from penstock.broker.consumers.consumer_targets cimport ConsumerTarget, TargetKey, TargetTable
from penstock.broker.flow_counters cimport FlowCounter
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.wire cimport octets
from penstock.wire.frame cimport Request

cdef bytes _TAG
cdef int _PULL_SUBSCRIPTION

cdef class PullTarget(ConsumerTarget):
    cdef readonly object tag_hashes
    cdef public object settings
    cdef public object topic_config
    cdef public object group_config
    cdef public str message_model
    cdef public object subscription
    cdef public long long version
    cdef public FlowCounter delivered

cdef class PullTargets:
    cdef object _settings
    cdef object _topics
    cdef object _groups
    cdef object _group_table
    cdef object _clients
    cdef object _offsets
    cdef TargetTable _table
    cdef TargetKey _key

    @cython.locals(target=PullTarget)
    cpdef PullTarget find(self, Request request, int flags)
    cpdef bint is_current(self, PullTarget target) except -1
    @cython.locals(version=int)
    cdef bint _is_subscribed(self, PullTarget target, Request request) except -1
    @cython.locals(own=bint, kind=int, length=int, at=int)
    cdef bint _read_key(self, Request request, int flags) except -1
