cimport cython
from penstock.store cimport native

cdef class Segment:
    cdef readonly object disk
    cdef readonly object path
    cdef readonly long long start
    cdef readonly long long size
    cdef readonly int fd
    cdef readonly object map
    cdef readonly unsigned char[::1] view
    cdef readonly bint locked
    cdef readonly bint retired
    cdef readonly long long allocated
    cdef object _allocating

cdef class SegmentList:
    cdef readonly object disk
    cdef readonly object folder
    cdef readonly long long segment_bytes
    cdef readonly list items
    cdef readonly long long first

    @cython.locals(number="long long", segment=Segment)
    cpdef Segment find(self, long long offset)
    cpdef int push(self, Segment segment) except -1
