cimport cython

cdef class PopCheckpoint:
    cdef readonly object key
    cdef readonly tuple queue
    cdef readonly long long start_offset
    cdef readonly long long invisible_ms
    cdef readonly int revive_queue_id
    cdef readonly int count
    cdef object _distances
    cdef public long long acked
    cdef public bint open
    cdef public long long due_ms
    cdef public long long revive_offset
    cdef public long long revive_log_offset
    cdef public long long log_offset

    cpdef long long distance(self, int index) except -1
    cpdef long long end_offset(self) except -1
    @cython.locals(distance="long long", bit="long long", index=int)
    cpdef long long bit_of(self, long long offset) except -1
    @cython.locals(bit="long long")
    cpdef object bits_of(self, object distances)
    cpdef int in_flight_count(self) except -1

@cython.locals(count=int)
cpdef int count_bits(long long bits) noexcept

cdef class PopCheckpoints:
    cdef dict _by_key
    cdef readonly list _due_heap
    cdef long long _sequence
    cdef list _by_revive_offset
    cdef readonly object _early_acks
    cdef readonly list open_by_queue
    cdef readonly dict in_flight

    cpdef PopCheckpoint get(self, object key)
    cpdef long long in_flight_in(self, object queue) except -1
    cpdef object add(self, PopCheckpoint checkpoint)
    @cython.locals(fresh="long long", count=int)
    cpdef int ack(self, PopCheckpoint checkpoint, long long bits) except -1
    cpdef int close(self, PopCheckpoint checkpoint) except -1
    @cython.locals(left="long long")
    cdef int _subtract_in_flight(self, PopCheckpoint checkpoint, long long count) except -1
    cpdef int set_due(self, PopCheckpoint checkpoint, long long due_ms) except -1
    cpdef long long due(self) except -1

@cython.locals(checkpoint=PopCheckpoint)
cdef bint _is_current(tuple entry) except -1
