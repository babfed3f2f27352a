import java.util.Locale;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;

/**
 * The time in which a load is measured, after it has warmed up. Prints "begin" and "end" at its
 * bounds, so that the runner reads the CPU time of the processes there, and one line of JSON.
 */
final class Window {
    final long begin;
    final long end;
    private final Histogram latencies = new Histogram();
    private final AtomicLong messages = new AtomicLong();
    private final AtomicLong failed = new AtomicLong();

    /** Begins in {@code warm} seconds. */
    Window(double warm, double seconds) {
        begin = System.nanoTime() + (long) (warm * 1e9);
        end = begin + (long) (seconds * 1e9);
    }

    boolean isOpen() {
        return System.nanoTime() < end;
    }

    /** Count the messages of a request that was answered now and took since {@code began}. */
    void acknowledged(long began, int count) {
        long now = System.nanoTime();
        if (now >= begin && now < end) {
            messages.addAndGet(count);
            latencies.add(now - began);
        }
    }

    /** Count a message that arrived now and should have been sent at {@code intended}. */
    void arrived(long intended) {
        if (intended >= begin && intended < end) {
            messages.incrementAndGet();
            latencies.add(System.nanoTime() - intended);
        }
    }

    long arrived() {
        return messages.get();
    }

    void failed(int count) {
        long now = System.nanoTime();
        if (now >= begin && now < end) {
            failed.addAndGet(count);
        }
    }

    /** Count the messages that should have arrived and did not. */
    void lost(long count) {
        failed.addAndGet(count);
    }

    /** Announce the bounds; returns at the end. */
    void announce() {
        sleepUntil(begin);
        System.out.println("begin");
        sleepUntil(end);
        System.out.println("end");
    }

    void report() {
        System.out.printf(
            Locale.ROOT,
            "{\"messages\":%d,\"failed\":%d,\"seconds\":%.3f,\"p50_us\":%d,\"p90_us\":%d,"
                + "\"p99_us\":%d,\"p999_us\":%d,\"max_us\":%d}%n",
            messages.get(), failed.get(), (end - begin) / 1e9, latencies.percentile(50),
            latencies.percentile(90), latencies.percentile(99), latencies.percentile(99.9),
            latencies.maxMicros());
    }

    static void sleepUntil(long time) {
        for (long left; (left = time - System.nanoTime()) > 0; ) {
            LockSupport.parkNanos(left);
        }
    }
}
