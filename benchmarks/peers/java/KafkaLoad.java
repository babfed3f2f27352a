import java.time.Duration;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.Semaphore;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.Callback;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Loads for Apache Kafka, through its Java client. */
public final class KafkaLoad {
    private static final Duration POLL = Duration.ofMillis(100);
    private static final long READY_S = 60;
    /** The client's default. */
    private static final String LINGER_MS = "5";

    private final Options options;
    private final String topic;

    private KafkaLoad(Options options) {
        this.options = options;
        this.topic = options.topic;
    }

    public static void main(String[] args) {
        int status = 0;
        try {
            new KafkaLoad(new Options(args)).run();
        } catch (Throwable failure) {
            failure.printStackTrace();
            status = 1;
        }
        System.exit(status);
    }

    private void run() throws Exception {
        switch (options.kind) {
            case "create" -> create();
            case "sync" -> sync(options.text("batching").equals("client"));
            case "batched" -> inFlight(true);
            case "pipelined" -> inFlight(false);
            case "fill" -> fill();
            case "consume" -> consume();
            case "rate" -> endToEnd();
            default -> throw new IllegalArgumentException(options.kind);
        }
    }

    private void create() throws Exception {
        NewTopic created = new NewTopic(topic, options.number("queues"), (short) 1);
        if (options.number("flush") > 0) {
            created.configs(Map.of("flush.messages", options.text("flush")));
        }
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", options.address))) {
            admin.createTopics(List.of(created)).all().get();
        }
    }

    /** Without batching, a request carries one message. */
    private KafkaProducer<byte[], byte[]> producer(boolean batching, String lingerMs) {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", options.address);
        properties.put("enable.idempotence", "false");
        properties.put("acks", "all");
        properties.put("linger.ms", batching ? lingerMs : "0");
        if (!batching) {
            properties.put("batch.size", "0");
            // A request has one batch of each partition as long as they fit into it.
            properties.put("max.request.size", String.valueOf(options.number("size") + 128));
        }
        KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(
            properties, new ByteArraySerializer(), new ByteArraySerializer());
        producer.partitionsFor(topic);
        return producer;
    }

    /** Each thread sends a message and waits for the acknowledgement. */
    private void sync(boolean batching) throws Exception {
        KafkaProducer<byte[], byte[]> producer = producer(batching, "0");
        byte[] body = new byte[options.number("size")];
        Window window = new Window(options.seconds("warm"), options.seconds("seconds"));
        Thread[] threads = new Thread[options.number("threads")];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> {
                while (window.isOpen()) {
                    long began = System.nanoTime();
                    try {
                        producer.send(new ProducerRecord<>(topic, body)).get();
                        window.acknowledged(began, 1);
                    } catch (Exception error) {
                        window.failed(1);
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

    /** One thread sends without waiting, with a limited number of messages in flight. */
    private void inFlight(boolean batching) throws Exception {
        KafkaProducer<byte[], byte[]> producer = producer(batching, LINGER_MS);
        byte[] body = new byte[options.number("size")];
        Semaphore slots = new Semaphore(options.number("in_flight"));
        Window window = new Window(options.seconds("warm"), options.seconds("seconds"));
        Thread announcer = new Thread(window::announce);
        announcer.start();
        while (window.isOpen()) {
            slots.acquire();
            long began = System.nanoTime();
            producer.send(new ProducerRecord<>(topic, body), (metadata, error) -> {
                slots.release();
                if (error == null) {
                    window.acknowledged(began, 1);
                } else {
                    window.failed(1);
                }
            });
        }
        announcer.join();
        window.report();
    }

    private void fill() {
        try (KafkaProducer<byte[], byte[]> producer = producer(true, LINGER_MS)) {
            byte[] body = new byte[options.number("size")];
            for (int sent = 0; sent < options.number("messages"); sent++) {
                producer.send(new ProducerRecord<>(topic, body));
            }
        }
    }

    private KafkaConsumer<byte[], byte[]> consumer(Properties properties) {
        properties.put("bootstrap.servers", options.address);
        properties.put("group.id", options.text("group"));
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(
            properties, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        List<TopicPartition> partitions = consumer.partitionsFor(topic).stream()
            .map(one -> new TopicPartition(topic, one.partition())).toList();
        consumer.assign(partitions);
        consumer.seekToBeginning(partitions);
        return consumer;
    }

    private void consume() throws Exception {
        Backlog backlog = new Backlog(options);
        Properties properties = new Properties();
        properties.put("max.poll.records", options.text("pull"));
        KafkaConsumer<byte[], byte[]> consumer = consumer(properties);
        while (!backlog.isDone()) {
            int count = consumer.poll(POLL).count();
            if (count > 0) {
                backlog.consumed(count);
            }
        }
        backlog.await();
    }

    private void endToEnd() throws Exception {
        KafkaProducer<byte[], byte[]> producer = producer(true, "0");
        KafkaConsumer<byte[], byte[]> consumer = consumer(new Properties());
        awaitConsumption(producer, consumer);
        Window window = new Window(options.seconds("warm"), options.seconds("seconds"));
        Thread receiver = new Thread(() -> {
            while (true) {
                for (ConsumerRecord<byte[], byte[]> one : consumer.poll(POLL)) {
                    window.arrived(Pace.intended(one.value()));
                }
            }
        });
        receiver.setDaemon(true);
        receiver.start();
        Callback ignored = (metadata, error) -> { };
        Pace.run(options, window, body -> producer.send(new ProducerRecord<>(topic, body), ignored));
    }

    /** Return when the consumer receives the messages of all partitions. */
    private void awaitConsumption(
        KafkaProducer<byte[], byte[]> producer, KafkaConsumer<byte[], byte[]> consumer)
        throws Exception {
        Set<Integer> probed = new HashSet<>();
        Set<TopicPartition> partitions = consumer.assignment();
        for (TopicPartition one : partitions) {
            byte[] body = Pace.body(Pace.PROBE, 16);
            producer.send(new ProducerRecord<>(topic, one.partition(), null, body)).get();
        }
        long deadline = System.nanoTime() + READY_S * 1_000_000_000L;
        while (probed.size() < partitions.size()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("partitions that are consumed: " + probed);
            }
            consumer.poll(POLL).forEach(one -> probed.add(one.partition()));
        }
    }
}
