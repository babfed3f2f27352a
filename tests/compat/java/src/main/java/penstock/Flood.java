package penstock;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends until it is stopped, one thread per queue: the numbers 0, 1, 2, ... as bodies, in order.
 * A number whose send fails is sent again until it is acknowledged; so a queue may hold a number
 * twice, but never one after a greater one.
 */
final class Flood {
    private final DefaultMQProducer producer;
    private final String topic;
    private final int pauseMs;
    private final List<Object> acknowledged = new ArrayList<>();
    private final AtomicInteger failures = new AtomicInteger();
    private final List<Thread> threads = new ArrayList<>();
    private volatile boolean stopping;

    Flood(DefaultMQProducer producer, String topic, int pauseMs) {
        this.producer = producer;
        this.topic = topic;
        this.pauseMs = pauseMs;
    }

    /** Gives the number of queues. */
    Object start() throws Exception {
        for (MessageQueue queue : producer.fetchPublishMessageQueues(topic)) {
            Thread thread = new Thread(() -> send(queue), "flood-" + queue.getQueueId());
            threads.add(thread);
            thread.start();
        }
        return threads.size();
    }

    /** Gives [broker, queue, number, offset] of every acknowledged message, and the failures. */
    Object stop() throws InterruptedException {
        stopping = true;
        for (Thread thread : threads) {
            thread.join();
        }
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("acknowledged", acknowledged);
        told.put("failures", failures.get());
        return told;
    }

    private void send(MessageQueue queue) {
        for (int number = 0; !stopping; ) {
            byte[] body = String.valueOf(number).getBytes(StandardCharsets.UTF_8);
            try {
                SendResult result = producer.send(new Message(topic, body), queue);
                if (result.getSendStatus() == SendStatus.SEND_OK) {
                    synchronized (acknowledged) {
                        acknowledged.add(List.of(queue.getBrokerName(), queue.getQueueId(), number,
                            result.getQueueOffset()));
                    }
                    number++;
                }
                Thread.sleep(pauseMs);
            } catch (Exception failure) {
                failures.incrementAndGet();
                pauseAfterFailure();
            }
        }
    }

    static void pauseAfterFailure() {
        try {
            Thread.sleep(100);
        } catch (InterruptedException ignored) {
            Thread.currentThread().interrupt();
        }
    }
}
