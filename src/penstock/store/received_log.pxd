cimport cython
from penstock.store.commitlog cimport CommitLog
from penstock.store.put cimport StoreWriter
from penstock.store.segment cimport Segment
from penstock.wire cimport layout, octets
from penstock.wire.record cimport StoredRecord

cdef int _NOTHING
cdef int _NO_QUEUE
cdef int _REFUSED
cdef int _VALID
cdef int _INCOMPLETE
cdef int _BLANK
cdef int _INVALID

cdef class ReceivedLog:
    cdef readonly CommitLog log
    cdef readonly StoreWriter writer
    cdef readonly object make_queue
    cdef readonly long long next_offset
    cdef readonly long long dispatched
    cdef readonly long long records
    cdef readonly long long damaged
    cdef bytearray _rest
    cdef long long _skip
    cdef StoredRecord _stored
    cdef str _problem

    cpdef bint dispatch(self) except -1
    cdef long long _needed(self) except -1
    @cython.locals(stored=StoredRecord, segment_bytes="long long", left="long long",
                   at="long long", end="long long", kind=int, size="long long",
                   available="long long")
    cdef long long _append_some(self, object data) except -1
    @cython.locals(stored=StoredRecord, size=int, magic=int)
    cdef int _check(self, long long at, long long end, long long left, long long offset) except -1
    cdef int _invalid(self, str problem) except -1
    @cython.locals(segment=Segment, stored=StoredRecord, begin="long long", at="long long",
                   end="long long", done=bint)
    cdef bint _dispatch_segment(self) except -1
    @cython.locals(stored=StoredRecord, status=int)
    cdef bint _dispatch_one(self) except -1
