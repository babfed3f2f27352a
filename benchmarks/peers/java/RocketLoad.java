import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Semaphore;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Loads for brokers that speak RocketMQ's protocol, through RocketMQ's Java client. */
public final class RocketLoad {
    private static final long READY_S = 60;

    private final Options options;
    private final String topic;
    private volatile Window measured;

    private RocketLoad(Options options) {
        this.options = options;
        this.topic = options.topic;
    }

    public static void main(String[] args) {
        int status = 0;
        try {
            new RocketLoad(new Options(args)).run();
        } catch (Throwable failure) {
            failure.printStackTrace();
            status = 1;
        }
        System.exit(status);
    }

    private void run() throws Exception {
        switch (options.kind) {
            case "sync" -> closedLoop(1);
            case "batched" -> closedLoop(options.number("batch"));
            case "pipelined" -> pipelined();
            case "fill" -> fill();
            case "consume" -> consume();
            case "rate" -> endToEnd();
            default -> throw new IllegalArgumentException(options.kind);
        }
    }

    private DefaultMQProducer producer() throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("penstock-load");
        producer.setNamesrvAddr(options.address);
        producer.start();
        awaitRoute(producer);
        return producer;
    }

    /** A topic that was just created may not be known to the NameServer yet. */
    private void awaitRoute(DefaultMQProducer producer) throws Exception {
        long deadline = System.nanoTime() + READY_S * 1_000_000_000L;
        while (true) {
            try {
                producer.fetchPublishMessageQueues(topic);
                return;
            } catch (MQClientException unknown) {
                if (System.nanoTime() > deadline) {
                    throw unknown;
                }
                Thread.sleep(50);
            }
        }
    }

    private DefaultMQPushConsumer consumer(String group) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(options.address);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        return consumer;
    }

    /** Each thread sends a message, or a batch of them, and waits for the acknowledgement. */
    private void closedLoop(int batch) throws Exception {
        DefaultMQProducer producer = producer();
        byte[] body = new byte[options.number("size")];
        Window window = new Window(options.seconds("warm"), options.seconds("seconds"));
        Thread[] threads = new Thread[options.number("threads")];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> {
                while (window.isOpen()) {
                    long began = System.nanoTime();
                    if (send(producer, body, batch)) {
                        window.acknowledged(began, batch);
                    } else {
                        window.failed(batch);
                    }
                }
            });
            threads[i].start();
        }
        window.announce();
        for (Thread thread : threads) {
            thread.join();
        }
        window.report();
    }

    private boolean send(DefaultMQProducer producer, byte[] body, int batch) {
        try {
            SendResult result = batch == 1
                ? producer.send(new Message(topic, body))
                : producer.send(messages(body, batch));
            return result.getSendStatus() == SendStatus.SEND_OK;
        } catch (Exception error) {
            return false;
        }
    }

    private List<Message> messages(byte[] body, int count) {
        List<Message> messages = new ArrayList<>(count);
        for (int i = 0; i < count; i++) {
            messages.add(new Message(topic, body));
        }
        return messages;
    }

    /** One thread sends single messages without waiting, with a limited number in flight. */
    private void pipelined() throws Exception {
        DefaultMQProducer producer = producer();
        byte[] body = new byte[options.number("size")];
        Semaphore slots = new Semaphore(options.number("in_flight"));
        Window window = new Window(options.seconds("warm"), options.seconds("seconds"));
        Thread announcer = new Thread(window::announce);
        announcer.start();
        while (window.isOpen()) {
            slots.acquire();
            long began = System.nanoTime();
            producer.send(new Message(topic, body), callback(
                () -> {
                    slots.release();
                    window.acknowledged(began, 1);
                },
                () -> {
                    slots.release();
                    window.failed(1);
                }));
        }
        announcer.join();
        window.report();
    }

    private static SendCallback callback(Runnable sent, Runnable failed) {
        return new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                (result.getSendStatus() == SendStatus.SEND_OK ? sent : failed).run();
            }

            @Override
            public void onException(Throwable error) {
                failed.run();
            }
        };
    }

    /** Send this number of messages in batches. */
    private void fill() throws Exception {
        DefaultMQProducer producer = producer();
        byte[] body = new byte[options.number("size")];
        int batch = options.number("batch");
        for (int sent = 0; sent < options.number("messages"); sent += batch) {
            while (!send(producer, body, batch)) {
                Thread.sleep(10);
            }
        }
    }

    private void consume() throws Exception {
        Backlog backlog = new Backlog(options);
        DefaultMQPushConsumer consumer = consumer(options.text("group"));
        consumer.setPullBatchSize(options.number("pull"));
        consumer.setConsumeMessageBatchMaxSize(options.number("listener"));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            backlog.consumed(messages.size());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        backlog.await();
    }

    private void endToEnd() throws Exception {
        DefaultMQProducer producer = producer();
        Set<Integer> probed = ConcurrentHashMap.newKeySet();
        DefaultMQPushConsumer consumer = consumer(options.text("group"));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                long intended = Pace.intended(message.getBody());
                if (intended == Pace.PROBE) {
                    probed.add(message.getQueueId());
                } else {
                    measured.arrived(intended);
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        awaitConsumption(producer, probed);
        measured = new Window(options.seconds("warm"), options.seconds("seconds"));
        SendCallback callback = callback(() -> { }, () -> { });
        Pace.run(options, measured, body -> producer.send(new Message(topic, body), callback));
    }

    /** Return when the consumer receives the messages of all queues. */
    private void awaitConsumption(DefaultMQProducer producer, Set<Integer> probed)
        throws Exception {
        List<MessageQueue> queues = producer.fetchPublishMessageQueues(topic);
        long deadline = System.nanoTime() + READY_S * 1_000_000_000L;
        while (probed.size() < queues.size()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("queues that are consumed: " + probed);
            }
            for (MessageQueue queue : queues) {
                if (!probed.contains(queue.getQueueId())) {
                    producer.send(new Message(topic, Pace.body(Pace.PROBE, 16)), queue);
                }
            }
            Thread.sleep(200);
        }
    }
}
