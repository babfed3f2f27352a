cimport cython
from penstock.store.commitlog cimport CommitLog
from penstock.store.put cimport StoreWriter
from penstock.store.segment cimport Segment
from penstock.wire cimport layout, octets
from penstock.wire.record cimport StoredRecord

cdef int _NOTHING
cdef int _NO_QUEUE
cdef int _REFUSED
cdef int _OTHER_BLANK
cdef int _OTHER_LENGTH
cdef int _LENGTHS
cdef int _TEXT_BYTES_MAX
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
    cdef long long _wanted
    cdef long long _skip
    cdef StoredRecord _stored
    cdef int _problem
    cdef long long _boundary
    cdef bytes _refused
    cdef long long _refused_at
    cdef dict _damage

    cpdef bint dispatch(self) except -1
    @cython.locals(stored=StoredRecord, segment_bytes="long long", left="long long",
                   at="long long", end="long long", kind=int, size="long long",
                   available="long long")
    cdef long long _append_some(self, object data) except -1
    @cython.locals(stored=StoredRecord, size=int, magic=int)
    cdef int _check(self, long long at, long long end, long long left, long long offset) except -1
    @cython.locals(stored=StoredRecord, place="long long", body_length="long long", prefix=int,
                   text_bytes="long long", topic_length=int, properties_length=int)
    cdef int _check_lengths(self, long long at, long long end, long long left, long long size,
                            int magic) except -1
    cdef int _incomplete(self, long long wanted) except -1
    cdef int _invalid(self, int problem) except -1
    @cython.locals(segment=Segment, stored=StoredRecord, begin="long long", at="long long",
                   end="long long", done=bint)
    cdef bint _dispatch_segment(self) except -1
    @cython.locals(stored=StoredRecord, status=int, unplaced="long long")
    cdef bint _dispatch_one(self) except -1
    @cython.locals(stored=StoredRecord)
    cdef bytes _topic(self)
