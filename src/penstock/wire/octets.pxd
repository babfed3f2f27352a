# C bodies of the byte primitives, which octets.py documents.
# This file is compiled into every module that cimports it, never on its own.

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    static inline int16_t pk_get16(const unsigned char *p) {
        uint16_t v; memcpy(&v, p, 2); return (int16_t)__builtin_bswap16(v);
    }
    static inline uint32_t pk_get32(const unsigned char *p) {
        uint32_t v; memcpy(&v, p, 4); return __builtin_bswap32(v);
    }
    static inline int64_t pk_get64(const unsigned char *p) {
        uint64_t v; memcpy(&v, p, 8); return (int64_t)__builtin_bswap64(v);
    }
    static inline void pk_put16(unsigned char *p, int64_t x) {
        uint16_t v = __builtin_bswap16((uint16_t)x); memcpy(p, &v, 2);
    }
    static inline void pk_put32(unsigned char *p, int64_t x) {
        uint32_t v = __builtin_bswap32((uint32_t)x); memcpy(p, &v, 4);
    }
    static inline void pk_put64(unsigned char *p, int64_t x) {
        uint64_t v = __builtin_bswap64((uint64_t)x); memcpy(p, &v, 8);
    }
    static inline Py_ssize_t pk_find(const unsigned char *p, Py_ssize_t n, int byte) {
        const void *hit = n > 0 ? memchr(p, byte, (size_t)n) : NULL;
        return hit ? (const unsigned char *)hit - p : -1;
    }
    static inline int pk_is_ascii(const unsigned char *p, Py_ssize_t n) {
        unsigned char seen = 0;
        for (Py_ssize_t i = 0; i < n; i++) seen |= p[i];
        return seen < 0x80;
    }
    static inline int32_t pk_hash(const unsigned char *p, Py_ssize_t n, int32_t seed) {
        uint32_t h = (uint32_t)seed;
        for (Py_ssize_t i = 0; i < n; i++) h = h * 31u + p[i];
        return (int32_t)h;
    }
    static inline uint32_t pk_mix(const unsigned char *p, Py_ssize_t n, uint32_t seed) {
        uint32_t h = seed ^ 0x811C9DC5u;
        for (Py_ssize_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x01000193u;
        return h;
    }

    /* CRC-32: by tables, eight bytes at a time; from 64 bytes on by carry-less products where the
       processor has them, four times as fast at 128 bytes. The tables are made on first use; two
       threads that do so at once write the same values, and `ready` is set afterwards. */
    static uint32_t pk_crc_table[8][256];
    static int pk_crc_ready = 0;
    static void pk_crc_prepare(void) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) c = c & 1 ? (c >> 1) ^ 0xEDB88320u : c >> 1;
            pk_crc_table[0][i] = c;
        }
        for (uint32_t i = 0; i < 256; i++)
            for (int t = 1; t < 8; t++) {
                uint32_t c = pk_crc_table[t - 1][i];
                pk_crc_table[t][i] = (c >> 8) ^ pk_crc_table[0][c & 0xFF];
            }
        __atomic_store_n(&pk_crc_ready, 1, __ATOMIC_RELEASE);
    }
    static inline uint32_t pk_crc_steps(uint32_t c, const unsigned char *p, Py_ssize_t n) {
        while (n >= 8) {
            uint32_t a, b;
            memcpy(&a, p, 4); memcpy(&b, p + 4, 4);
            a ^= c;
            c = pk_crc_table[7][a & 0xFF] ^ pk_crc_table[6][(a >> 8) & 0xFF]
              ^ pk_crc_table[5][(a >> 16) & 0xFF] ^ pk_crc_table[4][a >> 24]
              ^ pk_crc_table[3][b & 0xFF] ^ pk_crc_table[2][(b >> 8) & 0xFF]
              ^ pk_crc_table[1][(b >> 16) & 0xFF] ^ pk_crc_table[0][b >> 24];
            p += 8; n -= 8;
        }
        while (n-- > 0) c = (c >> 8) ^ pk_crc_table[0][(c ^ *p++) & 0xFF];
        return c;
    }
    #if defined(__x86_64__) && defined(__GNUC__)
    #define PK_CRC_FOLDS 1
    #include <immintrin.h>
    __attribute__((target("pclmul,sse2")))
    static inline __m128i pk_crc_move(__m128i seen, __m128i by) {
        return _mm_xor_si128(_mm_clmulepi64_si128(seen, by, 0x00),
                             _mm_clmulepi64_si128(seen, by, 0x11));
    }
    /* Sixteen bytes with the same remainder as the whole blocks of p: a carry-less product with a
       power of x shifts the previous bytes past the next ones. Four lanes while at least 64 bytes
       are left, because a product takes longer than the loop around it. */
    __attribute__((target("pclmul,sse2")))
    static Py_ssize_t pk_crc_fold(const unsigned char *p, Py_ssize_t n, unsigned char *folded) {
        const __m128i by_1 = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
        const __m128i by_4 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4);
        const __m128i *q = (const __m128i *)p;
        __m128i x = _mm_xor_si128(_mm_loadu_si128(q++), _mm_cvtsi32_si128(-1));
        Py_ssize_t blocks = n / 16 - 1;
        if (blocks >= 7) {
            __m128i y = _mm_loadu_si128(q), z = _mm_loadu_si128(q + 1), w = _mm_loadu_si128(q + 2);
            q += 3; blocks -= 3;
            for (; blocks >= 4; blocks -= 4, q += 4) {
                x = _mm_xor_si128(pk_crc_move(x, by_4), _mm_loadu_si128(q));
                y = _mm_xor_si128(pk_crc_move(y, by_4), _mm_loadu_si128(q + 1));
                z = _mm_xor_si128(pk_crc_move(z, by_4), _mm_loadu_si128(q + 2));
                w = _mm_xor_si128(pk_crc_move(w, by_4), _mm_loadu_si128(q + 3));
            }
            x = _mm_xor_si128(pk_crc_move(x, by_1), y);
            x = _mm_xor_si128(pk_crc_move(x, by_1), z);
            x = _mm_xor_si128(pk_crc_move(x, by_1), w);
        }
        for (; blocks > 0; blocks--, q++) x = _mm_xor_si128(pk_crc_move(x, by_1), _mm_loadu_si128(q));
        _mm_storeu_si128((__m128i *)folded, x);
        return n / 16 * 16;
    }
    #else
    #define PK_CRC_FOLDS 0
    #endif
    static inline uint32_t pk_crc31(const unsigned char *p, Py_ssize_t n) {
        uint32_t c = 0xFFFFFFFFu;
        if (!__atomic_load_n(&pk_crc_ready, __ATOMIC_ACQUIRE)) pk_crc_prepare();
        #if PK_CRC_FOLDS
        if (n >= 64 && __builtin_cpu_supports("pclmul")) {
            unsigned char folded[16];
            Py_ssize_t done = pk_crc_fold(p, n, folded);
            c = pk_crc_steps(0, folded, 16);
            p += done; n -= done;
        }
        #endif
        return ~pk_crc_steps(c, p, n) & 0x7FFFFFFFu;
    }
    static inline int pk_decimal(unsigned char *p, int64_t value) {
        unsigned char digits[20];
        int n = 0, out = 0;
        uint64_t u = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
        do { digits[n++] = (unsigned char)('0' + u % 10); u /= 10; } while (u);
        if (value < 0) p[out++] = '-';
        while (n) p[out++] = digits[--n];
        return out;
    }
    static inline void pk_hex(unsigned char *p, const unsigned char *s, Py_ssize_t n) {
        for (Py_ssize_t i = 0; i < n; i++) {
            p[2 * i] = (unsigned char)"0123456789ABCDEF"[s[i] >> 4];
            p[2 * i + 1] = (unsigned char)"0123456789ABCDEF"[s[i] & 15];
        }
    }
    static inline void pk_hex64(unsigned char *p, int64_t value) {
        uint64_t u = (uint64_t)value;
        for (int i = 15; i >= 0; i--) { p[i] = (unsigned char)"0123456789ABCDEF"[u & 15]; u >>= 4; }
    }
    """
    short pk_get16(const unsigned char *p) noexcept nogil
    unsigned int pk_get32(const unsigned char *p) noexcept nogil
    long long pk_get64(const unsigned char *p) noexcept nogil
    void pk_put16(unsigned char *p, long long x) noexcept nogil
    void pk_put32(unsigned char *p, long long x) noexcept nogil
    void pk_put64(unsigned char *p, long long x) noexcept nogil
    Py_ssize_t pk_find(const unsigned char *p, Py_ssize_t n, int byte) noexcept nogil
    bint pk_is_ascii(const unsigned char *p, Py_ssize_t n) noexcept nogil
    int pk_hash(const unsigned char *p, Py_ssize_t n, int seed) noexcept nogil
    unsigned int pk_mix(const unsigned char *p, Py_ssize_t n, unsigned int seed) noexcept nogil
    unsigned int pk_crc31(const unsigned char *p, Py_ssize_t n) noexcept nogil
    int pk_decimal(unsigned char *p, long long value) noexcept nogil
    void pk_hex(unsigned char *p, const unsigned char *s, Py_ssize_t n) noexcept nogil
    void pk_hex64(unsigned char *p, long long value) noexcept nogil

from libc.string cimport memcmp, memcpy, memset


cdef inline int get_i16(const unsigned char[::1] buf, Py_ssize_t at) noexcept nogil:
    return pk_get16(&buf[0] + at)

cdef inline int get_i32(const unsigned char[::1] buf, Py_ssize_t at) noexcept nogil:
    return <int>pk_get32(&buf[0] + at)

cdef inline unsigned int get_u32(const unsigned char[::1] buf, Py_ssize_t at) noexcept nogil:
    return pk_get32(&buf[0] + at)

cdef inline long long get_i64(const unsigned char[::1] buf, Py_ssize_t at) noexcept nogil:
    return pk_get64(&buf[0] + at)

cdef inline void put_i16(unsigned char[::1] buf, Py_ssize_t at, long long value) noexcept nogil:
    pk_put16(&buf[0] + at, value)

cdef inline void put_i32(unsigned char[::1] buf, Py_ssize_t at, long long value) noexcept nogil:
    pk_put32(&buf[0] + at, value)

cdef inline void put_i64(unsigned char[::1] buf, Py_ssize_t at, long long value) noexcept nogil:
    pk_put64(&buf[0] + at, value)

cdef inline void copy(unsigned char[::1] target, Py_ssize_t target_at,
                      const unsigned char[::1] source, Py_ssize_t source_at,
                      Py_ssize_t length) noexcept nogil:
    memcpy(&target[0] + target_at, &source[0] + source_at, <size_t>length)

cdef inline bint same(const unsigned char[::1] a, Py_ssize_t a_at,
                      const unsigned char[::1] b, Py_ssize_t b_at,
                      Py_ssize_t length) noexcept nogil:
    return memcmp(&a[0] + a_at, &b[0] + b_at, <size_t>length) == 0

cdef inline bint matches(const unsigned char[::1] buf, Py_ssize_t at, bytes name):
    return memcmp(&buf[0] + at, <const char *>name, <size_t>len(name)) == 0

cdef inline Py_ssize_t put_bytes(unsigned char[::1] buf, Py_ssize_t at, bytes text):
    cdef Py_ssize_t length = len(text)
    memcpy(&buf[0] + at, <const char *>text, <size_t>length)
    return length

cdef inline Py_ssize_t find(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t end,
                            int byte) noexcept nogil:
    cdef Py_ssize_t hit = pk_find(&buf[0] + at, end - at, byte)
    return hit + at if hit >= 0 else -1

cdef inline void zero(unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) noexcept nogil:
    memset(&buf[0] + at, 0, <size_t>length)

cdef inline int crc31(const unsigned char[::1] buf, Py_ssize_t at,
                      Py_ssize_t length) noexcept nogil:
    return <int>pk_crc31(&buf[0] + at, length)

cdef inline bint is_ascii(const unsigned char[::1] buf, Py_ssize_t at,
                          Py_ssize_t length) noexcept nogil:
    return pk_is_ascii(&buf[0] + at, length)

cdef inline int ascii_hash(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length,
                           int seed) noexcept nogil:
    return pk_hash(&buf[0] + at, length, seed)

cdef inline unsigned int mix_hash(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length,
                                  unsigned int seed) noexcept nogil:
    return pk_mix(&buf[0] + at, length, seed)

cdef inline int put_decimal(unsigned char[::1] buf, Py_ssize_t at, long long value) noexcept nogil:
    return pk_decimal(&buf[0] + at, value)

cdef inline void put_hex(unsigned char[::1] buf, Py_ssize_t at, const unsigned char[::1] source,
                         Py_ssize_t source_at, Py_ssize_t length) noexcept nogil:
    pk_hex(&buf[0] + at, &source[0] + source_at, length)

cdef inline Py_ssize_t put_hex_bytes(unsigned char[::1] buf, Py_ssize_t at, bytes source):
    pk_hex(&buf[0] + at, <const unsigned char *>(<const char *>source), len(source))
    return 2 * len(source)

cdef inline void put_hex_i64(unsigned char[::1] buf, Py_ssize_t at, long long value) noexcept nogil:
    pk_hex64(&buf[0] + at, value)
