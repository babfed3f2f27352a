cimport cython
from penstock.store.consumequeue cimport ConsumeQueue
from penstock.wire cimport octets

cdef class QueueTable:
    cdef readonly list rows
    cdef int[::1] _places
    cdef unsigned int _mask

    @cython.locals(place="unsigned int", number=int, queue=ConsumeQueue)
    cpdef ConsumeQueue find(self, unsigned char[::1] buffer, Py_ssize_t at, Py_ssize_t length,
                            int queue_id)
