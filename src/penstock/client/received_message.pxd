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
cdef int _CRC

cdef class MessageSource:
    cdef readonly bytes data
    cdef const unsigned char[::1] view
    cdef readonly str broker_name
    cdef readonly str topic
    cdef readonly str namespace
    cdef readonly long long received_ms

@cython.freelist(256)
cdef class ReceivedMessage:
    cdef readonly MessageSource source
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
    cdef public object process_queue
    cdef public object pop_receipt
    cdef public int state
    cdef public long long handling_since_ms
    cdef public object retry_level
    cdef public int local_retries

    cpdef bint has_tag(self, object tags) except -1
    cdef object _text(self, bytes pattern)
    @cython.locals(data=bytes, begin="Py_ssize_t", end="Py_ssize_t", at="Py_ssize_t",
                   stop="Py_ssize_t", first=bytes)
    cdef object _value(self, bytes pattern)
    @cython.locals(size=int, magic=int, sys_flag=int, at="Py_ssize_t", length=int, prefix=int)
    cdef int _locate(self, MessageSource source, Py_ssize_t start, Py_ssize_t end) except -1

@cython.locals(messages=list, message=ReceivedMessage, at="Py_ssize_t", end="Py_ssize_t", problem=int,
               crc=int)
cdef list _scan(MessageSource source, object tags, object bad, bint check_crc)
