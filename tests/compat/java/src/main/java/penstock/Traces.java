package penstock;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Clients that trace what they send and consume, and what their traces look like. */
@SuppressWarnings("deprecation")
final class Traces {
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();
    private final Map<String, Semaphore> consumed = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("trace.producer", this::startProducer);
        commands.put("trace.consumer", this::startConsumer);
        commands.put("trace.consumed", given -> consumed.get(given.text("consumer"))
            .tryAcquire(given.integer("count", 1), 40, TimeUnit.SECONDS));
        commands.put("trace.send", this::send);
        commands.put("trace.stop", this::stop);
        commands.put("trace.find", this::find);
        return commands;
    }

    /** A producer, which ends transactions as the body of the message says. */
    private Object startProducer(Arguments given) throws Exception {
        String name = given.text("producer");
        TransactionMQProducer producer = new TransactionMQProducer(null, given.text("group", name),
            given.hook(), true, given.text("trace_topic", null));
        given.configure(producer, name);
        producer.setSendMsgTimeout(10_000);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message half, Object argument) {
                return state(half);
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt half) {
                return state(half);
            }
        });
        producer.start();
        producers.put(name, producer);
        return null;
    }

    private static LocalTransactionState state(Message half) {
        return new String(half.getBody(), StandardCharsets.UTF_8).startsWith("commit")
            ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
    }

    /** A push consumer that fails so often with each message. */
    private Object startConsumer(Arguments given) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(given.text("group"),
            given.hook(), new AllocateMessageQueueAveragely(), true, given.text("trace_topic", null));
        given.configure(consumer, given.text("consumer"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(given.text("topic"), "*");
        int failTimes = given.integer("fail_times", 0);
        Semaphore count = new Semaphore(0);
        consumed.put(given.text("consumer"), count);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            count.release();
            return messages.get(0).getReconsumeTimes() < failTimes
                ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        consumers.put(given.text("consumer"), consumer);
        return null;
    }

    private Object send(Arguments given) throws Exception {
        DefaultMQProducer producer = producers.get(given.text("producer"));
        List<Message> messages = new ArrayList<>();
        for (Object one : given.list("messages")) {
            messages.add(Producers.message(new Arguments(Golden.object(one))));
        }
        if (given.text("how", "sync").equals("batch")) {
            return Producers.acknowledgement(messages.get(0), producer.send(messages));
        }
        List<Object> lines = new ArrayList<>();
        for (Message message : messages) {
            SendResult result = given.text("how", "sync").equals("transaction")
                ? producer.sendMessageInTransaction(message, null) : producer.send(message);
            Map<String, Object> line = Producers.acknowledgement(message, result);
            line.put("trace_on", result.isTraceOn());
            lines.add(line);
        }
        return lines;
    }

    /** Traces that wait are sent before a client ends. */
    private Object stop(Arguments given) {
        if (given.has("producer")) {
            producers.remove(given.text("producer")).shutdown();
        } else {
            consumers.remove(given.text("consumer")).shutdown();
        }
        return null;
    }

    /** Keys and text of each message of a trace topic with this key, asked through any producer. */
    private Object find(Arguments given) throws Exception {
        List<Object> lines = new ArrayList<>();
        for (MessageExt found : producers.get(given.text("producer")).queryMessage(
                given.text("topic"), given.text("key"), 32, 0, Long.MAX_VALUE).getMessageList()) {
            lines.add(List.of(found.getKeys(), new String(found.getBody(), StandardCharsets.UTF_8)));
        }
        return lines;
    }
}
