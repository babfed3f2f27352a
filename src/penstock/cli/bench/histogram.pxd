cimport cython

cdef int _HALF_BITS
cdef long long _VALUE_MAX

@cython.locals(bits=int, left="long long", step=int, shift=int)
cpdef Py_ssize_t bucket_of(long long value)

cdef class LogHistogram:
    cdef long long[::1] _counts
    cdef readonly long long count
    cdef readonly long long total
    cdef readonly long long max
    cdef readonly long long min

    cpdef int add(self, long long value, long long times) except -1
