package penstock;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Producers that ask and wait for the reply, and consumers that reply. */
final class Requests {
    /** Replies to what it consumes, and keeps what became of each reply. */
    private static final class Server {
        private final DefaultMQPushConsumer consumer;
        private final DefaultMQProducer producer;
        private final int pauseMs;
        private final int size;
        private final List<Map<String, Object>> outcomes = new ArrayList<>();

        private Server(
            DefaultMQPushConsumer consumer, DefaultMQProducer producer, int pauseMs, int size) {
            this.consumer = consumer;
            this.producer = producer;
            this.pauseMs = pauseMs;
            this.size = size;
        }

        private void serve(MessageExt request) {
            Map<String, Object> line = new LinkedHashMap<>();
            String asked = new String(request.getBody(), StandardCharsets.UTF_8);
            line.put("asked", asked);
            line.put("reply_to", MessageUtil.getReplyToClient(request));
            try {
                TimeUnit.MILLISECONDS.sleep(pauseMs);
                byte[] body = (asked + "!".repeat(1 + size)).getBytes(StandardCharsets.UTF_8);
                Message reply = MessageUtil.createReplyMessage(request, body);
                line.put("topic", reply.getTopic());
                SendResult result = producer.send(reply);
                line.put("status", result.getSendStatus().name());
                line.put("msg_id", result.getMsgId());
                line.put("offset_msg_id", result.getOffsetMsgId());
                line.put("queue_offset", result.getQueueOffset());
            } catch (Exception failure) {
                line.putAll(Session.describe(failure));
            }
            synchronized (outcomes) {
                outcomes.add(line);
                outcomes.notifyAll();
            }
        }
    }

    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, Server> servers = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("request.start", this::start);
        commands.put("request.stop", given -> {
            producers.remove(given.text("producer")).shutdown();
            return null;
        });
        commands.put("request.ask", this::ask);
        commands.put("request.client_id", given -> producers.get(given.text("producer"))
            .getDefaultMQProducerImpl().getMqClientFactory().getClientId());
        commands.put("reply.start", this::startServer);
        commands.put("reply.stop", this::stopServer);
        commands.put("reply.outcomes", this::outcomes);
        return commands;
    }

    /** Producers with the same "instance" share one client, with its id and connections. */
    private Object start(Arguments given) throws Exception {
        String name = given.text("producer");
        DefaultMQProducer producer = new DefaultMQProducer(given.text("group", "group-" + name));
        given.configure(producer, given.text("instance", name));
        producer.setSendMsgTimeout(10_000);
        producer.start();
        producers.put(name, producer);
        return null;
    }

    /** One line per request: the reply, or the error it met. */
    private Object ask(Arguments given) throws Exception {
        DefaultMQProducer producer = producers.get(given.text("producer"));
        long timeoutMs = given.number("timeout_ms", 20_000);
        List<Message> messages = new ArrayList<>();
        for (Object one : given.list("messages")) {
            messages.add(Producers.message(new Arguments(Golden.object(one))));
        }
        if (given.text("how", "sync").equals("async")) {
            return askAsync(producer, messages, timeoutMs);
        }
        List<Object> lines = new ArrayList<>();
        for (Message message : messages) {
            try {
                lines.add(line(askOne(producer, message, given, timeoutMs)));
            } catch (Exception failure) {
                lines.add(Session.describe(failure));
            }
        }
        return lines;
    }

    private static Message askOne(
        DefaultMQProducer producer, Message message, Arguments given, long timeoutMs)
        throws Exception {
        switch (given.text("how", "sync")) {
            case "selector":
                return producer.request(
                    message, (queues, asked, place) -> queues.get((Integer) place), 0, timeoutMs);
            case "queue":
                return producer.request(message, new MessageQueue(
                    message.getTopic(), given.text("broker"), given.integer("queue_id", 0)), timeoutMs);
            default:
                return producer.request(message, timeoutMs);
        }
    }

    private static Object askAsync(
        DefaultMQProducer producer, List<Message> messages, long timeoutMs) throws Exception {
        Object[] lines = new Object[messages.size()];
        CountDownLatch answered = new CountDownLatch(lines.length);
        for (int i = 0; i < lines.length; i++) {
            int place = i;
            producer.request(messages.get(i), new RequestCallback() {
                @Override
                public void onSuccess(Message reply) {
                    lines[place] = line(reply);
                    answered.countDown();
                }

                @Override
                public void onException(Throwable failure) {
                    lines[place] = Session.describe(failure);
                    answered.countDown();
                }
            }, timeoutMs);
        }
        if (!answered.await(60, TimeUnit.SECONDS)) {
            throw new TimeoutException(answered.getCount() + " requests were never called back");
        }
        return Arrays.asList(lines);
    }

    private static Map<String, Object> line(Message reply) {
        Map<String, Object> line = new LinkedHashMap<>();
        byte[] body = reply.getBody();
        line.put("body", body.length > 1000 ? null : new String(body, StandardCharsets.UTF_8));
        line.put("body_length", body.length);
        line.put("topic", reply.getTopic());
        line.put("properties", new LinkedHashMap<>(reply.getProperties()));
        if (reply instanceof MessageExt full) {
            line.put("born_host", String.valueOf(full.getBornHost()));
            line.put("store_host", String.valueOf(full.getStoreHost()));
            line.put("stored_ms", full.getStoreTimestamp());
        }
        return line;
    }

    private Object startServer(Arguments given) throws Exception {
        String name = given.text("consumer");
        DefaultMQProducer producer = new DefaultMQProducer("replies-" + name);
        given.configure(producer, "replies-" + name);
        producer.setSendMsgTimeout(15_000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.start();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(given.text("group"));
        given.configure(consumer, name);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(given.text("topic"), "*");
        Server server = new Server(
            consumer, producer, given.integer("pause_ms", 0), given.integer("size", 0));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(server::serve);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        servers.put(name, server);
        return null;
    }

    private Object stopServer(Arguments given) {
        Server server = servers.remove(given.text("consumer"));
        server.consumer.shutdown();
        server.producer.shutdown();
        return null;
    }

    /** What became of the replies, once there are "count" or "within_ms" have passed. */
    private Object outcomes(Arguments given) throws InterruptedException {
        List<Map<String, Object>> outcomes = servers.get(given.text("consumer")).outcomes;
        long deadline = System.currentTimeMillis() + given.number("within_ms", 20_000);
        synchronized (outcomes) {
            while (outcomes.size() < given.number("count", 0)) {
                long left = deadline - System.currentTimeMillis();
                if (left <= 0) {
                    break;
                }
                outcomes.wait(left);
            }
            return new ArrayList<>(outcomes);
        }
    }
}
