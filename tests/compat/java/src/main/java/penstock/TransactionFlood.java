package penstock;

import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Transactions until it is stopped, the numbers 0, 1, 2, ... as bodies: in turn committed, rolled
 * back, committed only when asked, rolled back only when asked. A local transaction that was never
 * begun, because its half could not be sent, counts as rolled back when it is asked for.
 */
final class TransactionFlood implements TransactionListener {
    private final TransactionMQProducer client;
    private final String topic;
    private final int pauseMs;
    private final Map<String, Boolean> decided = new TreeMap<>();
    private final AtomicInteger failures = new AtomicInteger();
    private final AtomicInteger questions = new AtomicInteger();
    private final Thread thread = new Thread(this::send, "transactions");
    private volatile boolean stopping;

    TransactionFlood(TransactionMQProducer client, String topic, int pauseMs) {
        this.client = client;
        this.topic = topic;
        this.pauseMs = pauseMs;
        client.setTransactionListener(this);
    }

    void start() throws Exception {
        client.start();
        thread.start();
    }

    /**
     * Sends no more, but goes on answering: gives by number whether the local transaction was
     * committed, and how many sends failed.
     */
    Object stop() throws InterruptedException {
        stopping = true;
        thread.join();
        Map<String, Object> told = new LinkedHashMap<>();
        synchronized (decided) {
            told.put("decided", new LinkedHashMap<>(decided));
        }
        told.put("failures", failures.get());
        told.put("questions", questions.get());
        return told;
    }

    void end() {
        client.shutdown();
    }

    private void send() {
        for (int number = 0; !stopping; number++) {
            byte[] body = String.valueOf(number).getBytes(StandardCharsets.UTF_8);
            try {
                client.sendMessageInTransaction(new Message(topic, body), number);
                Thread.sleep(pauseMs);
            } catch (Exception failure) {
                failures.incrementAndGet();
                Flood.pauseAfterFailure();
            }
        }
    }

    @Override
    public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
        int number = (Integer) argument;
        boolean commits = number % 2 == 0;
        synchronized (decided) {
            decided.put(String.valueOf(number), commits);
        }
        if (number % 4 >= 2) {
            return LocalTransactionState.UNKNOW;
        }
        return commits ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
    }

    @Override
    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        questions.incrementAndGet();
        synchronized (decided) {
            Boolean commits = decided.get(new String(message.getBody(), StandardCharsets.UTF_8));
            return Boolean.TRUE.equals(commits)
                ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
        }
    }
}
