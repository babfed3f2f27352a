cimport cython
from penstock.arrow.columns cimport byte_access
from penstock.wire cimport layout, octets

cdef int _SHORT
cdef int _MAGIC
cdef int _BEYOND
cdef int _LENGTHS
cdef long long _NO_NUMBER
cdef int _PROPERTIES_MAX
cdef unsigned int _TAGS
cdef unsigned int _KEYS
cdef long long _UNIQ_KEY
cdef int _D
cdef int _T
cdef int _LOW_LINE
cdef int _PLUS
cdef int _MINUS
cdef int _ZERO
cdef long long _I64_MAX
cdef unsigned long long _ONE

@cython.final
cdef class RecordView:
    cdef const unsigned char[::1] source
    cdef readonly Py_ssize_t at
    cdef readonly int size
    cdef readonly int sys_flag
    cdef readonly int born_host_length
    cdef readonly Py_ssize_t store_at
    cdef readonly int store_host_length
    cdef readonly Py_ssize_t body_at
    cdef readonly int body_length
    cdef readonly Py_ssize_t topic_at
    cdef readonly int topic_length
    cdef const unsigned char[::1] text
    cdef readonly Py_ssize_t text_at
    cdef readonly int text_length
    cdef readonly bint rewritten
    cdef readonly int property_count
    cdef int[::1] spans
    cdef readonly Py_ssize_t tags_at
    cdef readonly int tags_length
    cdef readonly Py_ssize_t keys_at
    cdef readonly int keys_length
    cdef readonly Py_ssize_t unique_at
    cdef readonly int unique_length
    cdef readonly Py_ssize_t transaction_at
    cdef readonly int transaction_length
    cdef readonly Py_ssize_t level_at
    cdef readonly int level_length
    cdef readonly Py_ssize_t deliver_at
    cdef readonly int deliver_length
    cdef readonly Py_ssize_t delay_at
    cdef readonly int delay_length
    cdef readonly int delay_unit_ms

    cpdef int bind(self, const unsigned char[::1] source) except -1
    @cython.locals(size=int, magic=int, sys_flag=int, place="Py_ssize_t", length=int, prefix=int)
    cpdef int parse(self, Py_ssize_t at, Py_ssize_t end) except -1
    @cython.locals(crc=int)
    cpdef bint matches_crc(self) noexcept
    @cython.locals(clean=bint, may_repeat=bint)
    cpdef int parse_properties(self, bint distinct) except -1
    @cython.locals(end="Py_ssize_t", property_count=int)
    cdef bint _split(self) except -1
    @cython.locals(at="Py_ssize_t", other="Py_ssize_t", i=int, k=int, length=int)
    cdef bint _repeats(self) except -1
    cdef int _rewrite(self) except -1
    @cython.locals(base="Py_ssize_t", seen="unsigned long long", bit="unsigned long long",
                   may_repeat=bint, i=int, name="Py_ssize_t", length=int, word="unsigned int")
    cdef bint _find_known(self) except -1
    cdef int _find_rare(self, Py_ssize_t name, int name_length, Py_ssize_t at,
                        int length) except -1
    @cython.locals(tag=bytes)
    cpdef bint tagged(self, tuple tags) except -1
    @cython.locals(negative=bint, value="long long", digit=int, i="Py_ssize_t")
    cdef long long number(self, Py_ssize_t at, Py_ssize_t length) noexcept
    cpdef bytes raw(self, Py_ssize_t at, Py_ssize_t length)
    cpdef int torn(self, long long physical_offset) except -1
