cimport cython
from penstock.wire cimport layout, octets

cdef int _COMPRESSED
cdef int _WRAPPED
cdef int _OK
cdef int _SHORT
cdef int _SIZE
cdef int _MAGIC
cdef int _LENGTHS
cdef int _PACKED

cdef class Source:
    cdef readonly bytes data
    cdef const unsigned char[::1] view
    cdef readonly str broker_name
    cdef public str topic
    cdef public str namespace
    cdef public long long received_ms

@cython.freelist(256)
cdef class ReceivedMessage:
    cdef readonly Source source
    cdef readonly Py_ssize_t at
    cdef readonly int size
    cdef readonly long long queue_offset
    cdef readonly Py_ssize_t body_at
    cdef readonly int body_length
    cdef readonly Py_ssize_t topic_at
    cdef readonly int topic_length
    cdef readonly Py_ssize_t properties_at
    cdef readonly int properties_length
    cdef bytes _body
    cdef dict _properties
    cdef public object owner
    cdef public object again
    cdef public int state
    cdef public long long since_ms
    cdef public int local_retries

    cpdef bint tagged(self, object tags) except -1
    cdef object _text(self, bytes pattern)
    @cython.locals(data=bytes, begin="Py_ssize_t", end="Py_ssize_t", at="Py_ssize_t",
                   stop="Py_ssize_t", first=bytes)
    cdef object _value(self, bytes pattern)
    @cython.locals(size=int, magic=int, sys_flag=int, place="Py_ssize_t", length=int, prefix=int)
    cdef int _place(self, Source source, Py_ssize_t at, Py_ssize_t end) except -1

@cython.locals(messages=list, message=ReceivedMessage, at="Py_ssize_t", end="Py_ssize_t", problem=int)
cdef list _walk(Source source, object tags, object bad)
