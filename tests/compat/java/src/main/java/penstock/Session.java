package penstock;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;

/**
 * Drives real clients by commands, many in one JVM: a JSON object per line in, an answer per line
 * out. A command names itself as "do"; the rest are its arguments. The answer is {"result"} or,
 * where the client threw, {"error", "code", "message"}. A command with "later_ms" is answered at
 * once and done so much later, its outcome unseen. The end of the input ends the program.
 */
public final class Session {
    /** One thing to do with the clients of this session. */
    public interface Command {
        Object run(Arguments given) throws Exception;
    }

    /** One thread for all commands: producers take turns among queues by thread. */
    private final ExecutorService worker = Executors.newSingleThreadExecutor(this::makeThread);
    private Thread workerThread;

    private Session() {
    }

    public static void main(String[] args) {
        Program.run(out -> new Session().run(out));
    }

    private Thread makeThread(Runnable body) {
        workerThread = new Thread(body, "commands");
        return workerThread;
    }

    private void run(PrintStream out) throws Exception {
        Map<String, Command> commands = new LinkedHashMap<>();
        commands.putAll(new Producers().commands());
        commands.putAll(new PushConsumers().commands());
        commands.putAll(new PullConsumers().commands());
        commands.putAll(new LiteConsumers().commands());
        commands.putAll(new OrderlyConsumers().commands());
        commands.putAll(new Transactions().commands());
        commands.putAll(new Timers().commands());
        commands.putAll(new Requests().commands());
        commands.putAll(new Traces().commands());
        commands.putAll(new Loads().commands());
        commands.put("golden.make", given -> Golden.make(given.map("document")));
        commands.put("golden.verify", given -> Verify.read(given.map("document")));
        commands.putAll(serverCommands("penstock.server.Admins"));
        commands.putAll(serverCommands("penstock.server.Pops"));
        commands.putAll(serverCommands("penstock.server.ReplicatedStores"));
        commands.putAll(serverCommands("penstock.server.Tools"));
        BufferedReader input =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            Arguments given = new Arguments(Golden.object(Json.parse(line)));
            Command command = commands.get(given.text("do"));
            out.println(Json.write(
                given.has("later_ms") ? postpone(command, given) : answer(quick(command), given)));
            out.flush();
        }
    }

    /** Of what only the builds with Apache's servers have: the admin client, POP. */
    @SuppressWarnings("unchecked")
    private static Map<String, Command> serverCommands(String name)
        throws ReflectiveOperationException {
        try {
            Class<?> family = Class.forName(name);
            Object made = family.getConstructor().newInstance();
            return (Map<String, Command>) family.getMethod("commands").invoke(made);
        } catch (ClassNotFoundException absent) {
            return Map.of();
        }
    }

    /** The same command in the worker thread, where no client's shutdown takes seconds. */
    private Command quick(Command command) {
        return command == null ? null : given -> {
            Future<Object> result = worker.submit(() -> command.run(given));
            while (true) {
                try {
                    return result.get(20, TimeUnit.MILLISECONDS);
                } catch (TimeoutException stillRunning) {
                    Shutdowns.hurry(workerThread);
                } catch (ExecutionException failure) {
                    throw failure.getCause() instanceof Exception cause ? cause : failure;
                }
            }
        };
    }

    /** For what shall happen while the next command is under way, or need not be waited for. */
    private static Map<String, Object> postpone(Command command, Arguments given) {
        Thread thread = new Thread(() -> {
            try {
                Thread.sleep(given.number("later_ms", 0));
                command.run(given);
            } catch (Exception failure) {
                failure.printStackTrace();
            }
        });
        thread.start();
        return Collections.singletonMap("result", null);
    }

    private static Map<String, Object> answer(Command command, Arguments given) {
        Map<String, Object> answer = new LinkedHashMap<>();
        try {
            if (command == null) {
                throw new IllegalArgumentException("no command " + given.text("do"));
            }
            answer.put("result", command.run(given));
        } catch (Throwable failure) {
            answer.clear();
            answer.putAll(describe(failure));
        }
        return answer;
    }

    /** A failure as the user of the client sees it. */
    public static Map<String, Object> describe(Throwable failure) {
        Integer code = null;
        for (Throwable t = failure; t != null && code == null; t = t.getCause()) {
            if (t instanceof MQBrokerException refused) {
                code = refused.getResponseCode();
            } else if (t instanceof MQClientException refused && refused.getResponseCode() > 0) {
                code = refused.getResponseCode();
            }
        }
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("error", failure.getClass().getSimpleName());
        line.put("code", code);
        line.put("message", String.valueOf(failure));
        return line;
    }
}
