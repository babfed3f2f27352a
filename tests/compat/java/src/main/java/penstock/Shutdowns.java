package penstock;

import java.util.Arrays;

/** Lets clients shut down quickly. */
public final class Shutdowns {
    private Shutdowns() {
    }

    /** Wakes the thread for which a client that shuts down often waits 3 s: it waits for an event. */
    public static void hurry(Thread closing) {
        if (isIn(closing.getStackTrace(), ".NettyRemotingClient", "shutdown")) {
            // Not while it handles an event: a heartbeat would be lost.
            Thread.getAllStackTraces().forEach((thread, stack) -> {
                if (thread.getName().startsWith("NettyEventExecutor")
                    && isIn(stack, ".LinkedBlockingQueue", "poll")) {
                    thread.interrupt();
                }
            });
        }
    }

    private static boolean isIn(StackTraceElement[] stack, String type, String method) {
        return Arrays.stream(stack).anyMatch(frame ->
            frame.getClassName().endsWith(type) && frame.getMethodName().equals(method));
    }
}
