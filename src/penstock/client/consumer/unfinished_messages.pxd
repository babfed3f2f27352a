cimport cython
from penstock.client.received_message cimport ReceivedMessage

cdef int _FINISHED

cdef class UnfinishedMessages:
    cdef public long long next_offset
    cdef public bint dropped
    cdef readonly dict messages
    cdef public long long count
    cdef public long long bytes
    cdef public long long received
    cdef public long long finished
    cdef public long long busy_ms
    cdef public object pull_waiter

    @cython.locals(message=ReceivedMessage, unfinished=dict, size="long long")
    cpdef object add_messages(self, list messages, long long next_offset)
    cpdef bint finish_one(self, ReceivedMessage message) except -1
    cpdef object resume_pull(self)
