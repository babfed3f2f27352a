cimport cython
from penstock.store.segment cimport Segment, SegmentList
from penstock.wire cimport layout, octets
from penstock.wire.record cimport Record

cdef long long _PREFAULT_BYTES, _PREFAULTS_OF_COPIES

cdef class CommitLog:
    cdef readonly object disk
    cdef readonly SegmentList segments
    cdef readonly bint by_mapping
    cdef readonly bint lock_memory
    cdef readonly long long end
    cdef readonly long long written
    cdef public long long hot_from
    cdef readonly set damaged
    cdef readonly long long rolls
    cdef public object refusal
    cdef Segment _current
    cdef unsigned char[::1] _target
    cdef long long _target_start
    cdef long long _target_size
    cdef long long _segment_end
    cdef long long _allocated_to
    cdef long long _prefaulted_to
    cdef long long _prefault_asked_to
    cdef object _next
    cdef object _on_roll

    @cython.locals(offset="long long")
    cpdef long long append(self, Record record, long long queue_offset, long long store_ms) except -2
    cpdef int make_room(self, long long size) except -2
    @cython.locals(length="long long", needed="long long", at="long long", segment=Segment)
    cpdef int append_raw(self, const unsigned char[::1] data) except -2
    cpdef int roll(self) except -2
    cpdef long long begin(self)
    cpdef int current_fd(self) except -1
