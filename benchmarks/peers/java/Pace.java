import java.nio.ByteBuffer;

/** Sends at a fixed rate. A message carries the time at which it should have been sent. */
final class Pace {
    /** Sends one message, without waiting for its acknowledgement. */
    interface Send {
        void send(byte[] body) throws Exception;
    }

    /** Marks a message that only tests whether a queue is being consumed. */
    static final long PROBE = Long.MIN_VALUE;
    private static final long DRAIN_S = 20;

    private Pace() {
    }

    static byte[] body(long intended, int size) {
        byte[] body = new byte[size];
        ByteBuffer.wrap(body).putLong(intended);
        return body;
    }

    static long intended(byte[] body) {
        return ByteBuffer.wrap(body).getLong();
    }

    /**
     * Send during warming up and measuring, then wait for what has not arrived yet. A message that
     * is late is sent at once, and its latency counts from the time at which it was due.
     */
    static void run(Options options, Window window, Send send) throws Exception {
        int size = options.number("size");
        double rate = options.number("rate");
        long began = System.nanoTime();
        Thread announcer = new Thread(window::announce);
        announcer.start();
        long due = 0;
        for (long count = 0; ; count++) {
            long intended = began + (long) (count * 1e9 / rate);
            if (intended >= window.end) {
                break;
            }
            due += intended >= window.begin ? 1 : 0;
            Window.sleepUntil(intended);
            send.send(body(intended, size));
        }
        announcer.join();
        long deadline = System.nanoTime() + DRAIN_S * 1_000_000_000L;
        while (window.arrived() < due && System.nanoTime() < deadline) {
            Thread.sleep(10);
        }
        window.lost(due - window.arrived());
        window.report();
    }
}
