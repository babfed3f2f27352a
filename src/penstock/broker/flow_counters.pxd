cdef class FlowCounter:
    cdef public long long nums
    cdef public long long size
    cdef public long long times
    cdef public long long behind_ms
    cdef public bint internal
    cdef public bint dropped
    cdef readonly tuple samples

cdef class Deliveries:
    cdef readonly long long pulls
    cdef readonly FlowCounter all
    cdef readonly FlowCounter user

    cpdef int count(self, FlowCounter flow, long long count, long long size,
                    long long behind_ms) except -1
