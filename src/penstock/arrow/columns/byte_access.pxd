# C versions of the functions of byte_access.py, which defines what each does.
# This file is compiled into every module that cimports it, never alone.

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
    /* Written at the end of a property, if it has a name before the first 1 and a value. */
    static inline int *pk_put_property(int *next, int begin, int assign, int end) {
        if (assign <= begin || end - assign <= 1) return next;
        next[0] = begin;
        next[1] = assign - begin;
        next[2] = assign + 1;
        next[3] = end - assign - 1;
        return next + 4;
    }
    /* `readable` bytes may be read; usually another record follows, so that no rest is copied. */
    static inline int pk_split_properties(const unsigned char *p, int n, Py_ssize_t readable,
                               int *restrict out) {
        unsigned char rest[16] = {0};
        unsigned all = 0;
        int begin = 0, assign = -1;
        int *next = out;
        for (int at = 0; at < n; at += 16) {
            const unsigned char *from = p + at;
            unsigned marks;
            if (readable - at < 16) { memcpy(rest, from, (size_t)(n - at)); from = rest; }
            marks = pk_marks(from);
            if (n - at < 16) marks &= ((1u << (n - at)) - 1) * 0x10001u;
            all |= marks;
            for (marks &= 0xFFFF; marks; marks &= marks - 1) {
                int i = __builtin_ctz(marks);
                if (from[i] == 2) {
                    next = pk_put_property(next, begin, assign, at + i);
                    begin = at + i + 1;
                    assign = -1;
                } else if (assign < 0) assign = at + i;
            }
        }
        next = pk_put_property(next, begin, assign, n);
        n = (int)(next - out) / 4;
        return all >> 16 ? -1 - n : n;
    }
    /* Which of 64 bytes are 0, 1, 2 or not ASCII: as signed numbers, they are below 3. */
    static inline uint64_t pk_low(const unsigned char *p) {
        uint64_t marks = 0;
    #ifdef __SSE2__
        for (int i = 0; i < 4; i++) {
            __m128i bytes = _mm_loadu_si128((const __m128i *)p + i);
            unsigned low = (unsigned)_mm_movemask_epi8(_mm_cmplt_epi8(bytes, _mm_set1_epi8(3)));
            marks |= (uint64_t)low << (16 * i);
        }
    #else
        for (int i = 0; i < 64; i++) marks |= (uint64_t)((signed char)p[i] < 3) << i;
    #endif
        return marks;
    }
    static inline uint64_t pk_word(const unsigned char *p) {
        uint64_t word; memcpy(&word, p, 8); return __builtin_bswap64(word);
    }
    /* Most records have the property names of the previous one. `state` has three numbers for each
       name: its first 8 bytes, its last 8 bytes if it is longer, and its length with its meaning:
       which of the row's three values it is, 3 if none, 7 if it is a rare one. The last number of
       `state` counts the names. No two names have the same numbers, so none is repeated. */
    static __attribute__((noinline)) int pk_remember(unsigned long long *state, int count,
                                                  uint64_t first, uint64_t last, uint64_t length) {
        unsigned long long *entry = state + 3 * count;
        unsigned meaning = 3;
        for (unsigned long long *other = state; other < entry; other += 3)
            if (other[0] == first && other[1] == last && other[2] >> 3 == length) return 0;
        if (length == 8 && first == 0x554E49515F4B4559u) meaning = 0;
        else if (length == 4 && first == 0x54414753u) meaning = 1;
        else if (length == 4 && first == 0x4B455953u) meaning = 2;
        else if (length >= 8 ? first == 0x54494D45525F4445u || first == 0x5F5F7472616E7361u
                               || first >> 24 == 0x44454C4159u
                 : length >= 5 && first >> 8 * (length - 5) == 0x44454C4159u) meaning = 7;
        entry[0] = first;
        entry[1] = last;
        entry[2] = length << 3 | meaning;
        return 1;
    }
    /* The positions of the separators 1 and 2; -1 if there are too many. */
    static inline int pk_separators(const unsigned char *text, int n, int *separators) {
        int count = 0;
        for (int at = 0; at < n; at += 64) {
            uint64_t marks = pk_low(text + at);
            if (n - at < 64) marks &= ((uint64_t)1 << (n - at)) - 1;
            for (; marks; marks &= marks - 1) separators[count++] = at + __builtin_ctzll(marks);
            if (count > 64) return -1;
        }
        separators[count] = n;  /* the last property may end with the text */
        return count;
    }
    static inline int pk_parse_properties(const unsigned char *text, int n, int place, int *spans,
                                          int *row, unsigned long long *state) {
        int separators[129];
        int marks = pk_separators(text, n, separators);
        int begin = 0, property_count = 0, rare = 0, new_names = 0;
        unsigned long long known = state[96];
        state[96] = 0;  /* no names are known after -1 is returned */
        row[0] = row[2] = row[4] = place;  /* missing values are copied too, 0 bytes of 32 */
        row[1] = row[3] = row[5] = 0;
        if (marks < 0) return -1;
        for (int i = 0; i < marks; i += 2) {
            int assign = separators[i], end = separators[i + 1];
            int length = assign - begin, value = end - assign - 1;
            unsigned long long *entry = state + 3 * property_count;
            uint64_t first = pk_word(text + begin), last = 0;
            if (text[assign] != 1 || (end < n && text[end] != 2)) return -1;
            if (length == 0 || value == 0) { begin = end + 1; continue; }
            spans[4 * property_count] = place + begin;
            spans[4 * property_count + 1] = length;
            spans[4 * property_count + 2] = place + assign + 1;
            spans[4 * property_count + 3] = value;
            if (length <= 8) first >>= 64 - 8 * length;
            else {
                last = pk_word(text + assign - 8);
                new_names |= length > 16;  /* the numbers do not cover the middle of the name */
            }
            if (known <= (unsigned)property_count || entry[0] != first || entry[1] != last
                || entry[2] >> 3 != (unsigned)length) {
                if (!pk_remember(state, property_count, first, last, (unsigned)length)) return -1;
                new_names = 1;
                known = (unsigned)property_count + 1;
            }
            {
                int *found = row + 2 * (entry[2] & 3);
                found[0] = place + assign + 1;
                found[1] = value;
            }
            rare |= (int)entry[2] & 4;
            begin = end + 1;
            property_count++;
        }
        new_names |= known != (unsigned)property_count;
        state[96] = (unsigned)property_count;
        return property_count | rare << 14 | new_names << 17;
    }
    static inline int pk_is_tail(unsigned char c) { return (c & 0xC0) == 0x80; }
    static inline int pk_is_utf8(const unsigned char *p, Py_ssize_t n) {
        Py_ssize_t at = 0;
        while (at < n) {
            unsigned char c = p[at];
            if (c < 0x80) { at++; continue; }
            if (c >= 0xC2 && c <= 0xDF) {
                if (n - at < 2 || !pk_is_tail(p[at + 1])) return 0;
                at += 2;
            } else if ((c & 0xF0) == 0xE0) {
                if (n - at < 3 || !pk_is_tail(p[at + 1]) || !pk_is_tail(p[at + 2])) return 0;
                if (c == 0xE0 && p[at + 1] < 0xA0) return 0;  /* overlong */
                if (c == 0xED && p[at + 1] > 0x9F) return 0;  /* a surrogate */
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
    /* A call of memcpy costs more than copying 32 bytes, so that is done if the source has them. */
    static inline void pk_copy_text(unsigned char *to, const unsigned char *from, Py_ssize_t n,
                                    Py_ssize_t readable) {
        if (n <= 32 && readable >= 32) memcpy(to, from, 32);
        else memcpy(to, from, (size_t)n);
    }
    static inline Py_ssize_t pk_copy_properties(
        unsigned char *to, Py_ssize_t used, int *restrict offsets, const unsigned char *from,
        Py_ssize_t readable, const int *restrict spans, int property_count) {
        for (int i = 0; i < property_count; i++) {
            pk_copy_text(to + used, from + spans[4 * i], spans[4 * i + 1], readable - spans[4 * i]);
            used += spans[4 * i + 1];
            offsets[i] = (int)used;
        }
        return used;
    }
    static inline int pk_put_ends(int *restrict offsets, int end, const int *restrict lengths,
                                  Py_ssize_t step, Py_ssize_t count) {
        for (Py_ssize_t i = 0; i < count; i++) offsets[i] = end += lengths[i * step];
        return end;
    }
    /* Copies 32 bytes at a time; bytes after the end are overwritten later. */
    static inline void pk_copy_slack(unsigned char *restrict to, const unsigned char *restrict from,
                                     int n) {
        memcpy(to, from, 32);
        if (n <= 32) return;
        if (n > 512) { memcpy(to + 32, from + 32, (size_t)n - 32); return; }
        for (int i = 32; i < n; i += 32) memcpy(to + i, from + i, 32);
    }
    static inline void pk_gather_texts(
        unsigned char *restrict to, const int *restrict offsets, const unsigned char *restrict from,
        const int *restrict places, Py_ssize_t step, Py_ssize_t count) {
        for (Py_ssize_t i = 0; i < count; i++)
            pk_copy_slack(to + offsets[i], from + places[i * step], places[i * step + 1]);
    }
    static inline void pk_repeat(unsigned char *to, Py_ssize_t length, int *offsets,
                                 Py_ssize_t count, Py_ssize_t times) {
        Py_ssize_t done = length, all = length * (times + 1);
        while (done < all) {  /* copy what is written, twice as much each time */
            Py_ssize_t more = all - done < done ? all - done : done;
            memcpy(to + done, to, (size_t)more);
            done += more;
        }
        for (Py_ssize_t i = 0; i < count * times; i++) offsets[count + i] = offsets[i] + (int)length;
    }
    static inline void pk_gather32(uint32_t *restrict to, const unsigned char *restrict from,
                                   const int *restrict places, Py_ssize_t step, Py_ssize_t count) {
        for (Py_ssize_t i = 0; i < count; i++) {
            uint32_t v; memcpy(&v, from + places[i * step], 4); to[i] = __builtin_bswap32(v);
        }
    }
    static inline void pk_gather64(unsigned long long *restrict to, const unsigned char *restrict from,
                                   const int *restrict places, Py_ssize_t step, Py_ssize_t count) {
        for (Py_ssize_t i = 0; i < count; i++) to[i] = pk_word(from + places[i * step]);
    }
    static inline void pk_scale64(long long *values, long long limit, long long factor,
                                  Py_ssize_t count) {
        for (Py_ssize_t i = 0; i < count; i++) {
            long long v = values[i];
            v = v > limit ? limit : v < -limit ? -limit : v;
            values[i] = v * factor;
        }
    }
    static inline Py_ssize_t pk_count_zeros(const int *places, Py_ssize_t step, Py_ssize_t count) {
        Py_ssize_t zeros = 0;
        for (Py_ssize_t i = 0; i < count; i++) zeros += places[i * step] == 0;
        return zeros;
    }
    static inline void pk_set_bits(unsigned char *bitmap, Py_ssize_t at, Py_ssize_t count) {
        for (; count > 0 && (at & 7 || count < 8); at++, count--) bitmap[at >> 3] |= 1 << (at & 7);
        memset(bitmap + (at >> 3), 0xFF, (size_t)(count >> 3));
        for (at += count & ~(Py_ssize_t)7, count &= 7; count > 0; at++, count--)
            bitmap[at >> 3] |= 1 << (at & 7);
    }
    static inline void pk_set_bits_where(unsigned char *bitmap, Py_ssize_t at, const int *places,
                                         Py_ssize_t step, Py_ssize_t count) {
        for (Py_ssize_t i = 0; i < count; i++, at++)
            bitmap[at >> 3] |= (places[i * step] != 0) << (at & 7);
    }
    """
    int pk_parse_properties(const unsigned char *text, int n, int place, int *spans, int *row,
               unsigned long long *state) noexcept nogil
    int pk_put_ends(int *offsets, int end, const int *lengths, Py_ssize_t step,
                    Py_ssize_t count) noexcept nogil
    void pk_gather_texts(unsigned char *to, const int *offsets, const unsigned char *source,
                         const int *places, Py_ssize_t step, Py_ssize_t count) noexcept nogil
    void pk_repeat(unsigned char *to, Py_ssize_t length, int *offsets, Py_ssize_t count,
                   Py_ssize_t times) noexcept nogil
    void pk_gather32(unsigned int *to, const unsigned char *source, const int *places,
                     Py_ssize_t step, Py_ssize_t count) noexcept nogil
    void pk_gather64(unsigned long long *to, const unsigned char *source, const int *places,
                     Py_ssize_t step, Py_ssize_t count) noexcept nogil
    void pk_scale64(long long *values, long long limit, long long factor,
                    Py_ssize_t count) noexcept nogil
    Py_ssize_t pk_count_zeros(const int *places, Py_ssize_t step, Py_ssize_t count) noexcept nogil
    void pk_set_bits(unsigned char *bitmap, Py_ssize_t at, Py_ssize_t count) noexcept nogil
    void pk_set_bits_where(unsigned char *bitmap, Py_ssize_t at, const int *places,
                           Py_ssize_t step, Py_ssize_t count) noexcept nogil
    int pk_split_properties(const unsigned char *p, int n, Py_ssize_t readable, int *out) noexcept nogil
    bint pk_is_utf8(const unsigned char *p, Py_ssize_t n) noexcept nogil
    void pk_copy_text(unsigned char *to, const unsigned char *source, Py_ssize_t n,
                      Py_ssize_t readable) noexcept nogil
    Py_ssize_t pk_copy_properties(unsigned char *to, Py_ssize_t used, int *offsets,
                              const unsigned char *source, Py_ssize_t readable, const int *spans,
                              int property_count) noexcept nogil


cdef inline int split_properties(const unsigned char[::1] text, Py_ssize_t at, Py_ssize_t end,
                      int[::1] spans) noexcept nogil:
    return pk_split_properties(&text[0] + at, <int>(end - at), text.shape[0] - at, &spans[0])

cdef inline int parse_properties(const unsigned char[::1] text, Py_ssize_t at, int length, Py_ssize_t base,
                    int[::1] spans, Py_ssize_t first, int[::1] places,
                    Py_ssize_t row, unsigned long long[::1] state) noexcept nogil:
    return pk_parse_properties(&text[0] + at, length, <int>(at - base), &spans[0] + 4 * first,
                  &places[0] + row, &state[0])

cdef inline bint is_utf8(const unsigned char[::1] text, Py_ssize_t at,
                         Py_ssize_t length) noexcept nogil:
    return pk_is_utf8(&text[0] + at, length)

cdef inline void copy_text(unsigned char[::1] target, Py_ssize_t target_at,
                           const unsigned char[::1] source, Py_ssize_t source_at,
                           Py_ssize_t length) noexcept nogil:
    pk_copy_text(&target[0] + target_at, &source[0] + source_at, length,
                 source.shape[0] - source_at)

cdef inline Py_ssize_t copy_properties(unsigned char[::1] target, Py_ssize_t used,
                                   unsigned char[::1] offsets, Py_ssize_t number,
                                   const unsigned char[::1] source, Py_ssize_t at,
                                   int[::1] spans, int part, int property_count) noexcept nogil:
    return pk_copy_properties(&target[0], used, (<int *>&offsets[0]) + number, &source[0] + at,
                          source.shape[0] - at, &spans[0] + 2 * part, property_count)

cdef inline Py_ssize_t put_ends(unsigned char[::1] offsets, Py_ssize_t number, Py_ssize_t end,
                                int[::1] places, Py_ssize_t at, Py_ssize_t step,
                                Py_ssize_t count) noexcept nogil:
    return pk_put_ends((<int *>&offsets[0]) + number, <int>end, &places[0] + at, step, count)

cdef inline void gather_texts(unsigned char[::1] target, unsigned char[::1] offsets,
                              Py_ssize_t number, const unsigned char[::1] source,
                              Py_ssize_t base, int[::1] places, Py_ssize_t at, Py_ssize_t step,
                              Py_ssize_t count) noexcept nogil:
    pk_gather_texts(&target[0], (<int *>&offsets[0]) + number, &source[0] + base,
                    &places[0] + at, step, count)

cdef inline void repeat(unsigned char[::1] target, Py_ssize_t at, Py_ssize_t length,
                        unsigned char[::1] offsets, Py_ssize_t number, Py_ssize_t count,
                        Py_ssize_t times) noexcept nogil:
    pk_repeat(&target[0] + at, length, (<int *>&offsets[0]) + number, count, times)

cdef inline void gather_i32(unsigned char[::1] values, Py_ssize_t number,
                            const unsigned char[::1] source, Py_ssize_t base, int[::1] places,
                            Py_ssize_t at, Py_ssize_t step, Py_ssize_t count) noexcept nogil:
    pk_gather32((<unsigned int *>&values[0]) + number, &source[0] + base, &places[0] + at, step,
                count)

cdef inline void gather_i64(unsigned char[::1] values, Py_ssize_t number,
                            const unsigned char[::1] source, Py_ssize_t base, int[::1] places,
                            Py_ssize_t at, Py_ssize_t step, Py_ssize_t count) noexcept nogil:
    pk_gather64((<unsigned long long *>&values[0]) + number, &source[0] + base, &places[0] + at,
                step, count)

cdef inline void scale_i64(unsigned char[::1] values, Py_ssize_t number, long long limit,
                           long long factor, Py_ssize_t count) noexcept nogil:
    pk_scale64((<long long *>&values[0]) + number, limit, factor, count)

cdef inline Py_ssize_t count_zeros(int[::1] places, Py_ssize_t at, Py_ssize_t step,
                                   Py_ssize_t count) noexcept nogil:
    return pk_count_zeros(&places[0] + at, step, count)

cdef inline void set_bits(unsigned char[::1] bitmap, Py_ssize_t number,
                          Py_ssize_t count) noexcept nogil:
    pk_set_bits(&bitmap[0], number, count)

cdef inline void set_bits_where(unsigned char[::1] bitmap, Py_ssize_t number, int[::1] places,
                                Py_ssize_t at, Py_ssize_t step,
                                Py_ssize_t count) noexcept nogil:
    pk_set_bits_where(&bitmap[0], number, &places[0] + at, step, count)

cdef inline void put_i32(unsigned char[::1] values, Py_ssize_t number,
                         int value) noexcept nogil:
    (<int *>&values[0])[number] = value

cdef inline void put_i64(unsigned char[::1] values, Py_ssize_t number,
                         long long value) noexcept nogil:
    (<long long *>&values[0])[number] = value

cdef inline int native_i32(unsigned char[::1] values, Py_ssize_t number) noexcept nogil:
    return (<int *>&values[0])[number]

cdef inline void set_bit(unsigned char[::1] bitmap, Py_ssize_t number) noexcept nogil:
    bitmap[number >> 3] |= <unsigned char>(1 << (number & 7))
