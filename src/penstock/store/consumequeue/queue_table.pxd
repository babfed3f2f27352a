cimport cython
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.wire cimport octets

cdef class QueueTable:
    cdef readonly list rows
    cdef readonly dict topics
    cdef int[::1] _slots
    cdef unsigned int _mask

    @cython.locals(slot="unsigned int", number=int, queue=ConsumeQueue)
    cpdef ConsumeQueue find(self, unsigned char[::1] buffer, Py_ssize_t at, Py_ssize_t length,
                            int queue_id)
    @cython.locals(slot="long long")
    cdef int _insert(self, int number) except -1
    cdef long long _first_slot(self, ConsumeQueue queue) except -1
    @cython.locals(slot="long long")
    cdef long long _slot_of(self, ConsumeQueue queue) except -1
    @cython.locals(slot="long long", number=int, last=ConsumeQueue)
    cdef int _remove(self, ConsumeQueue queue) except -1
    @cython.locals(slot="long long", first="long long")
    cdef int _close_gap(self, long long gap) except -1
