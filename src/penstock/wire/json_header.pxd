cimport cython
from penstock.wire cimport octets
from penstock.wire.fields cimport Fields

cdef int _DEPTH_MAX
cdef int _QUOTE
cdef int _COMMA
cdef int _COLON
cdef int _BACKSLASH
cdef int _OPEN
cdef int _CLOSE

cdef class JsonHeader:
    cdef unsigned char[::1] buffer
    cdef int end
    cdef int text_at
    cdef int text_length

    @cython.locals(key_at=int, key_length=int)
    cpdef int read(self, Fields fields, int at, int end) except -1
    cdef int _member(self, Fields fields, int at, int key_at, int key_length) except -1
    @cython.locals(key_at=int, key_length=int)
    cdef int _ext(self, Fields fields, int at) except -1
    @cython.locals(end=int, byte=int)
    cdef int _blank(self, int at) noexcept
    cdef int _expect(self, int at, int byte) except -1
    cdef int _finish(self, int at) except -1
    @cython.locals(end=int, close=int, escape=int)
    cdef int _string(self, int at) except -1
    @cython.locals(end=int, out=int, byte=int, unit=int, low=int)
    cdef int _escaped(self, int start, int at) except -1
    @cython.locals(unit=int, byte=int, i=int)
    cdef int _unit(self, int at) except -1
    @cython.locals(unit=int)
    cdef int _low_surrogate(self, int at) except -1
    cdef int _put_utf8(self, int out, int unit) noexcept
    @cython.locals(start=int, end=int)
    cdef int _scalar(self, int at) except -1
    @cython.locals(at=int, end=int, negative=bint, value="long long")
    cdef int _int(self) except? -1
    @cython.locals(end=int, depth=int, byte=int)
    cdef int _skip(self, int at) except -1
