package penstock;

import java.io.PrintStream;

/** How every program here runs: results alone on standard output, and an end in any case. */
public final class Program {
    public interface Body {
        void run(PrintStream out) throws Exception;
    }

    private Program() {
    }

    /** Does not return: clients leave threads behind that would keep the process alive. */
    public static void run(Body body) {
        PrintStream out = System.out;
        // Libraries may print too.
        System.setOut(System.err);
        int status = 0;
        try {
            body.run(out);
        } catch (Throwable failure) {
            failure.printStackTrace();
            status = 1;
        }
        out.flush();
        System.exit(status);
    }
}
