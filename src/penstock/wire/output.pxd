cimport cython
from penstock.wire cimport octets

cdef int _VERSION
cdef int _LANGUAGE
cdef int _BINARY
cdef bytes _JSON_SENDER
cdef bytes _JSON_FIELDS
cdef int _START_BYTES
cdef int _NUMBER_BYTES
cdef int _BINARY_FIXED_BYTES

cdef class Output:
    cdef readonly bytearray data
    cdef readonly unsigned char[::1] view
    cdef readonly Py_ssize_t capacity
    cdef public Py_ssize_t length
    cdef int _encoding
    cdef Py_ssize_t _frame_at
    cdef Py_ssize_t _ext_at
    cdef bint _first

    cpdef bytes take(self)
    cpdef int reserve(self, Py_ssize_t length) except -1
    @cython.locals(capacity="Py_ssize_t")
    cdef int _grow(self, Py_ssize_t length) except -1
    @cython.locals(at="Py_ssize_t")
    cpdef int begin(self, int encoding, int code, int opaque) except -1
    @cython.locals(at="Py_ssize_t", length=int)
    cpdef int field_number(self, bytes name, long long value) except -1
    @cython.locals(at="Py_ssize_t")
    cpdef int field_plain(self, bytes name, bytes value) except -1
    @cython.locals(at="Py_ssize_t", digits="Py_ssize_t")
    cpdef int field_offset_id(self, bytes name, bytes host, long long offset) except -1
    @cython.locals(at="Py_ssize_t", digits="Py_ssize_t", length="Py_ssize_t", i="Py_ssize_t")
    cpdef int field_offset_ids(self, bytes name, bytes host, long long[::1] offsets,
                               Py_ssize_t count) except -1
    @cython.locals(i="Py_ssize_t", place="Py_ssize_t", letter=int)
    cpdef bint field_span(self, bytes name, unsigned char[::1] source, Py_ssize_t at,
                          Py_ssize_t length) except -1
    @cython.locals(at="Py_ssize_t", start="Py_ssize_t", header_length="Py_ssize_t")
    cpdef int end(self, Py_ssize_t body_length) except -1
    cpdef int append(self, bytes data) except -1
    @cython.locals(at="Py_ssize_t")
    cdef Py_ssize_t _name(self, bytes name)

@cython.locals(pieces=list, name=bytes, text=bytes, remark_text=bytes, fields_length="Py_ssize_t",
               header=bytearray, view="unsigned char[::1]", at="Py_ssize_t", i="Py_ssize_t")
cdef bytes _binary_header(int code, object ext, int opaque, int flag, object remark, int language,
                          int version)
