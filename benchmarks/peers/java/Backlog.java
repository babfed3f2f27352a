import java.util.Locale;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;

/** Measures how fast a backlog is consumed, after a warm-up of some messages. */
final class Backlog {
    private static final long TIMEOUT_S = 120;

    private final long warm;
    private final long wanted;
    private final AtomicLong seen = new AtomicLong();
    private final CountDownLatch done = new CountDownLatch(1);
    private volatile long first;
    private volatile long began;

    Backlog(Options options) {
        warm = options.number("warm_messages");
        wanted = warm + options.number("messages");
    }

    void consumed(int count) {
        long now = seen.addAndGet(count);
        if (now >= warm && now - count < warm) {
            first = now;
            began = System.nanoTime();
            System.out.println("begin");
        }
        if (now >= wanted && now - count < wanted) {
            System.out.println("end");
            report(now);
            done.countDown();
        }
    }

    boolean isDone() {
        return done.getCount() == 0;
    }

    void await() throws InterruptedException {
        if (!done.await(TIMEOUT_S, TimeUnit.SECONDS)) {
            throw new IllegalStateException("consumed " + seen + " of " + wanted + " messages");
        }
    }

    private void report(long now) {
        System.out.printf(
            Locale.ROOT, "{\"messages\":%d,\"failed\":0,\"seconds\":%.3f}%n", now - first,
            (System.nanoTime() - began) / 1e9);
    }
}
