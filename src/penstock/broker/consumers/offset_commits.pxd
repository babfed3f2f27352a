cimport cython
from penstock.broker.consumers.consumer_targets cimport ConsumerTarget, TargetKey, TargetTable
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _SUCCESS
cdef int _ONEWAY

cdef class CommitTarget(ConsumerTarget):
    cdef public object topic_config
    cdef public object group_config

cdef class OffsetCommits:
    cdef object _requests
    cdef object _offsets
    cdef object _store
    cdef object _topics
    cdef object _groups
    cdef TargetTable _table
    cdef TargetKey _key

    @cython.locals(field=int, offset="long long", target=CommitTarget)
    cpdef object handle(self, Request request, Output output, long long client, long long now_ms)
    cdef bint _is_current(self, CommitTarget target) except -1
