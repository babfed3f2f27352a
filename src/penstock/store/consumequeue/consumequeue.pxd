cimport cython
from penstock.wire cimport layout, octets

cdef int _FILLER_SIZE
cdef long long _NEVER
cdef unsigned char[::1] _NO_VIEW

cdef class ConsumeQueue:
    # What a message needs comes first and together: with thousands of queues, each cache line of a
    # queue is read from memory.
    cdef readonly bytes topic
    cdef readonly int queue_id
    cdef readonly int key_seed
    cdef readonly int tag_seed
    cdef public bint writable
    cdef public bint used
    cdef public bint dirty
    cdef public bint watched
    cdef public bint needs_blocks
    cdef readonly bint deleted
    cdef public long long delay_ms
    cdef public long long max_offset
    cdef long long _end
    cdef long long _mapped_from
    cdef long long _allocated
    cdef long long _preallocate_at
    cdef public long long puts
    cdef public long long put_bytes
    cdef unsigned char[::1] _view
    cdef long long _mapped_to
    cdef public long long min_offset
    cdef public long long hot_from
    cdef public long long watched_from
    cdef readonly long long file_entries
    cdef readonly object disk
    cdef str _folder
    cdef public list file_starts
    cdef object _mapped_queues
    cdef object _map
    cdef public bytearray replayed
    cdef public bint checked
    cdef public bint complete
    cdef list _unsynced
    cdef bint _names_changed

    @cython.locals(offset="long long", at="long long")
    cpdef long long append(self, long long physical_offset, int size, long long tags_code) except -1
    cpdef int add_replayed(self, long long physical_offset, int size,
                           long long tags_code) except -1
    cpdef int ready(self) except -1
    @cython.locals(high="long long", low="long long", middle="long long")
    cpdef long long visible_max(self, long long confirm_offset)
    @cython.locals(at="long long", size=int)
    cdef long long _end_of(self, long long offset)
    cpdef bint is_hot(self, long long offset)
    cpdef int reserve(self, long long count) except -1
    cpdef int _allocate_entry(self, long long offset) except -1
