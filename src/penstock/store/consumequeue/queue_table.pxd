cimport cython
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.wire cimport octets

cdef class QueueTable:
    cdef readonly list rows
    cdef readonly dict topics
    cdef int[::1] _places
    cdef unsigned int _mask

    @cython.locals(place="unsigned int", number=int, queue=ConsumeQueue)
    cpdef ConsumeQueue find(self, unsigned char[::1] buffer, Py_ssize_t at, Py_ssize_t length,
                            int queue_id)
    @cython.locals(place="long long")
    cdef int _place(self, int number) except -1
    cdef long long _home(self, ConsumeQueue queue) except -1
    @cython.locals(place="long long")
    cdef long long _place_of(self, ConsumeQueue queue) except -1
    @cython.locals(place="long long", number=int, last=ConsumeQueue)
    cdef int _take_out(self, ConsumeQueue queue) except -1
    @cython.locals(place="long long", home="long long")
    cdef int _close_gap(self, long long gap) except -1
