# C bodies that release the GIL; native.py documents them.

cdef extern from *:
    """
    #include <errno.h>
    #include <poll.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <time.h>
    #include <unistd.h>

    #define PN_GET(i) __atomic_load_n(&s[i], __ATOMIC_SEQ_CST)
    #define PN_SET(i, v) __atomic_store_n(&s[i], (v), __ATOMIC_SEQ_CST)
    enum { PN_WANTED, PN_FLUSHED, PN_ERRNO, PN_STOP, PN_CURRENT, PN_HEAD, PN_TAIL, PN_WAKE,
           PN_NOTIFY, PN_INTERVAL, PN_LEAST, PN_THOROUGH, PN_DEMAND, PN_SYNCS, PN_SYNC_NS,
           PN_ROLLED = 16, PN_PLACES = 16, PN_COUNTS = 32, PN_COUNT_PLACES = 16 };

    static void pn_touch(unsigned char *p, Py_ssize_t length) {
        Py_BEGIN_ALLOW_THREADS
        /* or-ing nothing in is a write for the page table and no change for the appender */
        for (Py_ssize_t at = 0; at < length; at += 4096) __atomic_fetch_or(p + at, 0, __ATOMIC_RELAXED);
        Py_END_ALLOW_THREADS
    }
    static int pn_lock(unsigned char *p, Py_ssize_t length) {
        int result;
        Py_BEGIN_ALLOW_THREADS
        result = mlock(p, (size_t)length) ? errno : 0;
        Py_END_ALLOW_THREADS
        return result;
    }
    static void pn_unlock(unsigned char *p, Py_ssize_t length) { munlock(p, (size_t)length); }

    static void pn_notify(volatile long long *s) {
        uint64_t one = 1;
        ssize_t done = write((int)PN_GET(PN_NOTIFY), &one, 8);
        (void)done; /* a full eventfd is readable already */
    }
    static long long pn_now_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    static void pn_count_sync(volatile long long *s, long long took) {
        int place = 0;
        long long bound = 128000;
        while (place < PN_COUNT_PLACES - 1 && took > bound) { place++; bound *= 2; }
        PN_SET(PN_COUNTS + place, PN_GET(PN_COUNTS + place) + 1);
        PN_SET(PN_SYNC_NS, PN_GET(PN_SYNC_NS) + took);
    }
    static int pn_sync(volatile long long *s, int current) {
        for (;;) {
            long long head = PN_GET(PN_HEAD);
            int rolled = head < PN_GET(PN_TAIL);
            int fd = rolled ? (int)PN_GET(PN_ROLLED + head % PN_PLACES) : current;
            long long began = pn_now_ns();
            if (fdatasync(fd)) {
                PN_SET(PN_ERRNO, errno);
                pn_notify(s);
                return 0;
            }
            PN_SET(PN_SYNCS, PN_GET(PN_SYNCS) + 1);
            pn_count_sync(s, pn_now_ns() - began);
            if (!rolled) return 1;
            close(fd);
            PN_SET(PN_HEAD, head + 1);
        }
    }
    static void pn_flush_loop(volatile long long *s) {
        long long waited = 0;
        Py_BEGIN_ALLOW_THREADS
        for (;;) {
            long long interval = PN_GET(PN_INTERVAL);
            struct pollfd wake = { .fd = (int)PN_GET(PN_WAKE), .events = POLLIN };
            if (poll(&wake, 1, interval ? (int)interval : -1) > 0) {
                uint64_t count;
                ssize_t done = read(wake.fd, &count, 8);
                (void)done;
            }
            if (PN_GET(PN_ERRNO)) break;
            int stop = PN_GET(PN_STOP) != 0;
            long long wanted = PN_GET(PN_WANTED);
            int current = (int)PN_GET(PN_CURRENT);
            long long behind = wanted - PN_GET(PN_FLUSHED);
            waited += interval;
            int demanded = stop || interval == 0 || PN_GET(PN_DEMAND) > PN_GET(PN_FLUSHED);
            if (behind > 0 && (demanded || behind >= PN_GET(PN_LEAST) || waited >= PN_GET(PN_THOROUGH))) {
                waited = 0;
                if (!pn_sync(s, current)) break;
                PN_SET(PN_FLUSHED, wanted);
                pn_notify(s);
            }
            if (stop) break;
        }
        Py_END_ALLOW_THREADS
    }
    static inline long long pn_load(const volatile long long *s) { return __atomic_load_n(s, __ATOMIC_SEQ_CST); }
    static inline void pn_store(volatile long long *s, long long v) { __atomic_store_n(s, v, __ATOMIC_SEQ_CST); }
    """
    void pn_touch(unsigned char *p, Py_ssize_t length) noexcept
    int pn_lock(unsigned char *p, Py_ssize_t length) noexcept
    void pn_unlock(unsigned char *p, Py_ssize_t length) noexcept
    void pn_flush_loop(long long *s) noexcept
    long long pn_load(const long long *s) noexcept
    void pn_store(long long *s, long long v) noexcept


cdef inline long long load(long long[::1] state, Py_ssize_t place) noexcept:
    return pn_load(&state[place])

cdef inline void store(long long[::1] state, Py_ssize_t place, long long value) noexcept:
    pn_store(&state[place], value)

cdef inline void touch(unsigned char[::1] view, Py_ssize_t at, Py_ssize_t length) noexcept:
    pn_touch(&view[0] + at, length)

cdef inline int lock(unsigned char[::1] view, Py_ssize_t at, Py_ssize_t length) noexcept:
    return pn_lock(&view[0] + at, length)

cdef inline void unlock(unsigned char[::1] view, Py_ssize_t at, Py_ssize_t length) noexcept:
    pn_unlock(&view[0] + at, length)

cdef inline void flush_loop(long long[::1] state) noexcept:
    pn_flush_loop(&state[0])
