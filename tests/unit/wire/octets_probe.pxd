from penstock.wire cimport octets

cpdef int get_i16(const unsigned char[::1] buf, Py_ssize_t at)
cpdef int get_i32(const unsigned char[::1] buf, Py_ssize_t at)
cpdef unsigned int get_u32(const unsigned char[::1] buf, Py_ssize_t at)
cpdef long long get_i64(const unsigned char[::1] buf, Py_ssize_t at)
cpdef void put_i16(unsigned char[::1] buf, Py_ssize_t at, long long value)
cpdef void put_i32(unsigned char[::1] buf, Py_ssize_t at, long long value)
cpdef void put_i64(unsigned char[::1] buf, Py_ssize_t at, long long value)
cpdef void copy(unsigned char[::1] target, Py_ssize_t target_at, const unsigned char[::1] source,
                Py_ssize_t source_at, Py_ssize_t length)
cpdef bint same(const unsigned char[::1] a, Py_ssize_t a_at, const unsigned char[::1] b,
                Py_ssize_t b_at, Py_ssize_t length)
cpdef bint matches(const unsigned char[::1] buf, Py_ssize_t at, bytes name)
cpdef Py_ssize_t put_bytes(unsigned char[::1] buf, Py_ssize_t at, bytes text)
cpdef Py_ssize_t find(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t end, int byte)
cpdef void zero(unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length)
cpdef int crc31(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length)
cpdef bint is_ascii(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length)
cpdef int ascii_hash(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length, int seed)
cpdef unsigned int mix_hash(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length,
                            unsigned int seed)
cpdef int put_decimal(unsigned char[::1] buf, Py_ssize_t at, long long value)
cpdef void put_hex(unsigned char[::1] buf, Py_ssize_t at, const unsigned char[::1] source,
                   Py_ssize_t source_at, Py_ssize_t length)
cpdef Py_ssize_t put_hex_bytes(unsigned char[::1] buf, Py_ssize_t at, bytes source)
cpdef void put_hex_i64(unsigned char[::1] buf, Py_ssize_t at, long long value)
