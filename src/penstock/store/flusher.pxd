cimport cython
from penstock.store cimport native

cdef int _WANTED
cdef int _FLUSHED
cdef int _ERRNO

cdef class Flusher:
    cdef readonly object disk
    cdef readonly bint group_commit
    cdef readonly long long[::1] state
    cdef readonly int wake_fd
    cdef readonly int notify_fd
    cdef object _thread
    cdef bint _started

    cpdef int want(self, long long offset) except -1
    cpdef long long flushed(self)
    cpdef long long failed(self)
