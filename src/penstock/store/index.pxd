cimport cython
from penstock.wire cimport layout, octets

cdef int _KEYS_AHEAD
cdef long long _NEVER

cdef class IndexFile:
    cdef readonly object disk
    cdef readonly object path
    cdef readonly long long slots
    cdef readonly long long entries
    cdef readonly long long size
    cdef readonly long long entries_at
    cdef readonly long long allocated
    cdef public bint needs_blocks
    cdef long long _preallocate_at
    cdef readonly object map
    cdef readonly unsigned char[::1] view

    cpdef int next_number(self)
    cpdef bint is_full(self)
    @cython.locals(number=int)
    cpdef int ready(self) except -1
    @cython.locals(number=int, seconds="long long", slot_at="long long", previous=int, at="long long",
                   used=int)
    cpdef int put(self, int key_hash, long long physical_offset, long long store_ms) except -1
    @cython.locals(kept="long long", first_ms="long long", first_offset="long long", used=int,
                   number="long long", at="long long", key_hash=int, slot_at="long long",
                   previous=int, last="long long", last_ms="long long", last_offset="long long")
    cpdef long long rethread(self, long long end_offset) except -1
    @cython.locals(kept="long long", last_offset="long long", at="long long", offset="long long",
                   key_hash=int, seconds=int, written=bint)
    cpdef long long _count_below(self, long long end_offset) except -1

cdef class Index:
    cdef readonly object disk
    cdef readonly object folder
    cdef readonly long long slots
    cdef readonly long long entries
    cdef readonly list files
    cdef readonly IndexFile current
    cdef readonly list dirty
    cdef IndexFile _spare

    cpdef IndexFile add(self, long long now_ms)
    @cython.locals(current=IndexFile)
    cpdef int put(self, int key_hash, long long physical_offset, long long store_ms) except -1
