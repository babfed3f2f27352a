cimport cython
from penstock.wire cimport octets

cdef int _FIELDS_MAX
cdef int _I64_DIGITS

cdef class Fields:
    cdef public unsigned char[::1] buffer
    cdef public int code
    cdef public int flag
    cdef public int opaque
    cdef public int version
    cdef public int language
    cdef readonly int count
    cdef int _remark_at
    cdef int _remark_length
    cdef int[::1] _table
    cdef int[::1] _letters

    cpdef void bind(self, unsigned char[::1] buffer)
    cpdef void release(self)
    @cython.locals(i=int)
    cpdef void clear(self)
    @cython.locals(count=int, letter=int)
    cpdef int add(self, int key_at, int key_length, int at, int length) except -1
    @cython.locals(length=int, i=int)
    cpdef int find(self, bytes name)
    cpdef int letter(self, int letter)
    cpdef int value_at(self, int field) except -1
    cpdef int value_length(self, int field) except -1
    @cython.locals(at=int, end=int, start=int, digits=int, digit=int, negative=bint, value="long long")
    cpdef long long number(self, int field) except? -1
    @cython.locals(value="long long")
    cpdef int number32(self, int field) except? -1
    cpdef long long _number_checked(self, int at, int end) except? -1
    cpdef long long i64(self, bytes name) except? -1
    cpdef long long i64_or(self, bytes name, long long default) except? -1
    @cython.locals(value="long long")
    cpdef long long i32(self, bytes name) except? -1
    cpdef bint flag_or(self, bytes name, bint default)
    @cython.locals(at=int)
    cpdef bint truth(self, int field)
    @cython.locals(i=int, name=bytes)
    cpdef void set_language(self, int at, int length)
    cpdef void set_remark(self, int at, int length)
    cpdef bint is_response(self)
    cpdef bint is_oneway(self)
