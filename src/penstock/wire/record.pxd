cimport cython
from penstock.wire cimport layout, octets

cdef int _NOTHING
cdef int _RECORD
cdef int _BLANK
cdef int _SHORT
cdef int _UNWRITTEN
cdef int _MAGIC
cdef int _BEYOND
cdef int _LENGTHS
cdef int _CRC
cdef int _ELSEWHERE
cdef int _TORN
cdef int _PROPERTIES_BYTES_MAX
cdef int _TOPIC_BYTES_MAX
cdef int _SEPARATOR
cdef int _ASSIGN
cdef int _SECTOR_BYTES
cdef int _SPECIAL_DELAY
cdef int _SPECIAL_TIMER
cdef int _SPECIAL_PREPARED
cdef int _SPECIAL_STRIP
cdef int _SPECIAL_PRIORITY

cdef class PropertyMarks:
    cdef unsigned char[::1] buffer
    cdef readonly Py_ssize_t tags_at
    cdef readonly Py_ssize_t tags_length
    cdef readonly Py_ssize_t keys_at
    cdef readonly Py_ssize_t keys_length
    cdef readonly Py_ssize_t unique_at
    cdef readonly Py_ssize_t unique_length
    cdef readonly bint wait
    cdef readonly int special

    cpdef void bind(self, unsigned char[::1] buffer)
    cpdef void release(self)
    @cython.locals(stop="Py_ssize_t", assign="Py_ssize_t")
    cpdef void scan(self, Py_ssize_t at, Py_ssize_t end)
    cdef void _mark(self, Py_ssize_t name_at, Py_ssize_t name_length, Py_ssize_t at, Py_ssize_t length)
    cdef void _mark_special(self, Py_ssize_t name_at, Py_ssize_t name_length)
    cpdef long long tags_code(self) except? -1
    cpdef int hash(self, Py_ssize_t at, Py_ssize_t length, int seed) except? -1

cdef class Record:
    cdef public Py_ssize_t body_bytes_max
    cdef readonly unsigned char[::1] source
    cdef readonly PropertyMarks marks
    cdef public Py_ssize_t topic_at
    cdef public Py_ssize_t topic_length
    cdef public Py_ssize_t properties_at
    cdef public Py_ssize_t properties_length
    cdef public Py_ssize_t body_at
    cdef public Py_ssize_t body_length
    cdef public int queue_id
    cdef public int flag
    cdef public int sys_flag
    cdef public long long born_ms
    cdef public bytes born_host
    cdef public bytes store_host
    cdef public int reconsume_times
    cdef public long long prepared_offset
    cdef public bytes extra
    cdef readonly int size
    cdef public long long tags_code

    cpdef void bind(self, unsigned char[::1] source)
    cpdef void release(self)
    @cython.locals(properties="Py_ssize_t", end="Py_ssize_t")
    cpdef int prepare(self) except -1
    @cython.locals(length="Py_ssize_t", extra="Py_ssize_t")
    cdef Py_ssize_t _properties_bytes(self)
    @cython.locals(long_topic=bint, sys_flag=int, magic=int, crc=int)
    cpdef int put(self, unsigned char[::1] target, Py_ssize_t at, long long queue_offset,
                  long long physical_offset, long long store_ms) except -1
    @cython.locals(length="Py_ssize_t")
    cdef void _put_properties(self, unsigned char[::1] target, Py_ssize_t at)

cdef class BatchWalk:
    cdef Py_ssize_t at
    cdef Py_ssize_t end

    cpdef void start(self, Py_ssize_t at, Py_ssize_t length)
    @cython.locals(at="Py_ssize_t", left="Py_ssize_t", size="Py_ssize_t", body_length="Py_ssize_t",
                   properties_length="Py_ssize_t")
    cpdef int next(self, Record record) except -2

cdef class StoredRecord:
    cdef readonly unsigned char[::1] buffer
    cdef readonly PropertyMarks marks
    cdef public long long durable_to
    cdef readonly int problem
    cdef readonly Py_ssize_t at
    cdef readonly int size
    cdef readonly int magic
    cdef readonly int body_crc
    cdef readonly int queue_id
    cdef readonly int flag
    cdef readonly long long queue_offset
    cdef readonly long long physical_offset
    cdef readonly int sys_flag
    cdef readonly long long born_ms
    cdef readonly int born_host_length
    cdef readonly long long store_ms
    cdef readonly Py_ssize_t store_host_at
    cdef readonly int store_host_length
    cdef readonly int reconsume_times
    cdef readonly long long prepared_offset
    cdef readonly Py_ssize_t body_at
    cdef readonly Py_ssize_t body_length
    cdef readonly Py_ssize_t topic_at
    cdef readonly int topic_length
    cdef readonly Py_ssize_t properties_at
    cdef readonly int properties_length

    cpdef void bind(self, unsigned char[::1] buffer)
    cpdef void release(self)
    @cython.locals(size=int, magic=int)
    cpdef int read(self, Py_ssize_t at, Py_ssize_t end) except -1
    @cython.locals(sys_flag=int, place="Py_ssize_t", left="Py_ssize_t", topic_prefix=int)
    cdef int _read_lengths(self, Py_ssize_t at, Py_ssize_t end) except -1
    cdef void _read_numbers(self, Py_ssize_t at)
    cpdef int check(self, long long physical_offset) except -1
    @cython.locals(end="Py_ssize_t", place="Py_ssize_t", stop="Py_ssize_t", share="Py_ssize_t",
                   to_next="Py_ssize_t")
    cdef bint _sector_missing(self, long long physical_offset)
    cpdef void scan(self)
    cdef int _nothing(self, int problem)
