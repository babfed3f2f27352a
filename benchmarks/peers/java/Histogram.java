import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicLongArray;

/**
 * Counts durations in nanoseconds. Each power of two has 128 buckets; a percentile is the upper
 * bound of its bucket, at most 0.8 % above the exact value.
 */
final class Histogram {
    private static final int HALF_BITS = 7;

    private final AtomicLongArray counts = new AtomicLongArray(64 << HALF_BITS);
    private final AtomicLong total = new AtomicLong();
    private final AtomicLong max = new AtomicLong();

    void add(long nanos) {
        long value = Math.max(nanos, 0);
        int shift = Math.max(64 - Long.numberOfLeadingZeros(value) - HALF_BITS - 1, 0);
        counts.incrementAndGet((shift << HALF_BITS) + (int) (value >> shift));
        total.incrementAndGet();
        max.accumulateAndGet(value, Math::max);
    }

    long count() {
        return total.get();
    }

    long maxMicros() {
        return max.get() / 1000;
    }

    /** In microseconds; 0 without values. */
    long percentile(double percent) {
        long rank = Math.max((long) Math.ceil(total.get() * percent / 100), 1);
        long seen = 0;
        for (int bucket = 0; bucket < counts.length(); bucket++) {
            seen += counts.get(bucket);
            if (seen >= rank) {
                int shift = Math.max((bucket >> HALF_BITS) - 1, 0);
                long bound = ((bucket - ((long) shift << HALF_BITS) + 1) << shift) - 1;
                return Math.min(bound, max.get()) / 1000;
            }
        }
        return 0;
    }
}
