cimport cython
from penstock.store.put cimport StoreWriter
from penstock.store.segment cimport Segment
from penstock.wire.record cimport StoredRecord

cdef int _BLANK
cdef int _NOTHING
cdef int _NO_QUEUE

cdef class Replay:
    cdef readonly StoreWriter writer
    cdef readonly object make_queue
    cdef readonly StoredRecord stored
    cdef readonly long long records
    cdef readonly long long damaged
    cdef readonly long long skipped
    cdef readonly dict removed
    cdef readonly long long last_offset
    cdef readonly bint ended

    @cython.locals(at="long long", end="long long", stop="long long", kind=int, stored=StoredRecord)
    cpdef long long run(self, Segment segment, long long offset, long long bytes_max) except -1
    @cython.locals(stored=StoredRecord)
    cdef bint _is_removed(self) except -1
    @cython.locals(stored=StoredRecord)
    cdef bytes _topic(self)
