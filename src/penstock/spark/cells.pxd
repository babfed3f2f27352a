# C bodies of the columns' primitives; cells.py says what each means.
# This file is compiled into every module that cimports it, never by itself.

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #ifdef __SSE2__
    #include <emmintrin.h>
    #endif

    /* Which of 16 bytes are 1 or 2, and (from bit 16 on) which are not ASCII. */
    static inline unsigned pk_marks(const unsigned char *p) {
    #ifdef __SSE2__
        __m128i bytes = _mm_loadu_si128((const __m128i *)p);
        __m128i hits = _mm_or_si128(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(1)),
                                    _mm_cmpeq_epi8(bytes, _mm_set1_epi8(2)));
        return (unsigned)_mm_movemask_epi8(hits) | (unsigned)_mm_movemask_epi8(bytes) << 16;
    #else
        unsigned marks = 0;
        for (int i = 0; i < 16; i++)
            marks |= (unsigned)(p[i] - 1u < 2u) << i | (unsigned)(p[i] >> 7) << (16 + i);
        return marks;
    #endif
    }
    /* A piece is written out at its end, if it has a name before the first 1 and a value. */
    static inline int *pk_piece(int *next, int begin, int assign, int end) {
        if (assign <= begin || end - assign <= 1) return next;
        next[0] = begin;
        next[1] = assign - begin;
        next[2] = assign + 1;
        next[3] = end - assign - 1;
        return next + 4;
    }
    /* `there` bytes may be read; mostly another record follows, so that no rest is copied. */
    static inline int pk_split(const unsigned char *p, int n, Py_ssize_t there,
                               int *restrict out) {
        unsigned char rest[16] = {0};
        unsigned all = 0;
        int begin = 0, assign = -1;
        int *next = out;
        for (int at = 0; at < n; at += 16) {
            const unsigned char *from = p + at;
            unsigned marks;
            if (there - at < 16) { memcpy(rest, from, (size_t)(n - at)); from = rest; }
            marks = pk_marks(from);
            if (n - at < 16) marks &= ((1u << (n - at)) - 1) * 0x10001u;
            all |= marks;
            for (marks &= 0xFFFF; marks; marks &= marks - 1) {
                int i = __builtin_ctz(marks);
                if (from[i] == 2) {
                    next = pk_piece(next, begin, assign, at + i);
                    begin = at + i + 1;
                    assign = -1;
                } else if (assign < 0) assign = at + i;
            }
        }
        next = pk_piece(next, begin, assign, n);
        n = (int)(next - out) / 4;
        return all >> 16 ? -1 - n : n;
    }
    static inline int pk_is_tail(unsigned char c) { return (c & 0xC0) == 0x80; }
    static inline int pk_is_text(const unsigned char *p, Py_ssize_t n) {
        Py_ssize_t at = 0;
        while (at < n) {
            unsigned char c = p[at];
            if (c < 0x80) { at++; continue; }
            if (c >= 0xC2 && c <= 0xDF) {
                if (n - at < 2 || !pk_is_tail(p[at + 1])) return 0;
                at += 2;
            } else if ((c & 0xF0) == 0xE0) {
                if (n - at < 3 || !pk_is_tail(p[at + 1]) || !pk_is_tail(p[at + 2])) return 0;
                if (c == 0xE0 && p[at + 1] < 0xA0) return 0;  /* longer than it need be */
                if (c == 0xED && p[at + 1] > 0x9F) return 0;  /* half of a pair */
                at += 3;
            } else if (c >= 0xF0 && c <= 0xF4) {
                if (n - at < 4 || !pk_is_tail(p[at + 1]) || !pk_is_tail(p[at + 2])
                    || !pk_is_tail(p[at + 3])) return 0;
                if (c == 0xF0 && p[at + 1] < 0x90) return 0;
                if (c == 0xF4 && p[at + 1] > 0x8F) return 0;  /* beyond U+10FFFF */
                at += 4;
            } else return 0;
        }
        return 1;
    }
    /* A call of memcpy costs more than 32 bytes do; these are read where the source has them. */
    static inline void pk_copy_text(unsigned char *to, const unsigned char *from, Py_ssize_t n,
                                    Py_ssize_t there) {
        if (n <= 32 && there >= 32) memcpy(to, from, 32);
        else memcpy(to, from, (size_t)n);
    }
    static inline Py_ssize_t pk_copy_pieces(
        unsigned char *to, Py_ssize_t used, int *restrict offsets, const unsigned char *from,
        Py_ssize_t there, const int *restrict spans, int pieces) {
        for (int i = 0; i < pieces; i++) {
            pk_copy_text(to + used, from + spans[4 * i], spans[4 * i + 1], there - spans[4 * i]);
            used += spans[4 * i + 1];
            offsets[i] = (int)used;
        }
        return used;
    }
    """
    int pk_split(const unsigned char *p, int n, Py_ssize_t there, int *out) noexcept nogil
    bint pk_is_text(const unsigned char *p, Py_ssize_t n) noexcept nogil
    void pk_copy_text(unsigned char *to, const unsigned char *source, Py_ssize_t n,
                      Py_ssize_t there) noexcept nogil
    Py_ssize_t pk_copy_pieces(unsigned char *to, Py_ssize_t used, int *offsets,
                              const unsigned char *source, Py_ssize_t there, const int *spans,
                              int pieces) noexcept nogil


cdef inline int split(const unsigned char[::1] text, Py_ssize_t at, Py_ssize_t end,
                      int[::1] spans) noexcept nogil:
    return pk_split(&text[0] + at, <int>(end - at), text.shape[0] - at, &spans[0])

cdef inline bint is_text(const unsigned char[::1] text, Py_ssize_t at,
                         Py_ssize_t length) noexcept nogil:
    return pk_is_text(&text[0] + at, length)

cdef inline void copy_text(unsigned char[::1] target, Py_ssize_t target_at,
                           const unsigned char[::1] source, Py_ssize_t source_at,
                           Py_ssize_t length) noexcept nogil:
    pk_copy_text(&target[0] + target_at, &source[0] + source_at, length,
                 source.shape[0] - source_at)

cdef inline Py_ssize_t copy_pieces(unsigned char[::1] target, Py_ssize_t used,
                                   unsigned char[::1] offsets, Py_ssize_t number,
                                   const unsigned char[::1] source, Py_ssize_t at,
                                   int[::1] spans, int part, int pieces) noexcept nogil:
    return pk_copy_pieces(&target[0], used, (<int *>&offsets[0]) + number, &source[0] + at,
                          source.shape[0] - at, &spans[0] + 2 * part, pieces)

cdef inline void put_i32(unsigned char[::1] values, Py_ssize_t number,
                         int value) noexcept nogil:
    (<int *>&values[0])[number] = value

cdef inline void put_i64(unsigned char[::1] values, Py_ssize_t number,
                         long long value) noexcept nogil:
    (<long long *>&values[0])[number] = value

cdef inline void set_bit(unsigned char[::1] bitmap, Py_ssize_t number) noexcept nogil:
    bitmap[number >> 3] |= <unsigned char>(1 << (number & 7))
