cimport cython
from penstock.client.consumer.unfinished_messages cimport UnfinishedMessages
from penstock.client.received_message cimport ReceivedMessage

cdef int _FINISHED
cdef int _HANDLING
cdef int _WAITING

cdef class HandlerTable:
    cdef readonly dict by_topic

    @cython.locals(topic=str, found=list)
    cpdef object find(self, ReceivedMessage message)

@cython.locals(queue=UnfinishedMessages)
cpdef object start(ReceivedMessage message, HandlerTable handlers, long long now_ms)
@cython.locals(queue=UnfinishedMessages)
cpdef bint finish(ReceivedMessage message, object result, long long now_ms) except -1
@cython.locals(message=ReceivedMessage)
cpdef object finish_returned(object jobs, long long now_ms, object complete)
cdef UnfinishedMessages unfinished_of(ReceivedMessage message)
