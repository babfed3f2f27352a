package penstock;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.impl.consumer.RebalanceImpl;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Push consumers by name; each keeps what it received, in the order of its listener's calls. */
final class PushConsumers {
    private static final class Consumer {
        private final DefaultMQPushConsumer client;
        private final List<List<Object>> received = new ArrayList<>();
        private final int pauseMsMax;
        private final int failTimes;

        private Consumer(DefaultMQPushConsumer client, int pauseMsMax, int failTimes) {
            this.client = client;
            this.pauseMsMax = pauseMsMax;
            this.failTimes = failTimes;
        }

        /** Whether the listener says that it could not handle a message so often tried. */
        private boolean fails(List<MessageExt> messages) {
            return messages.get(0).getReconsumeTimes() < failTimes;
        }

        private void receive(List<MessageExt> messages) {
            for (MessageExt message : messages) {
                if (pauseMsMax > 0) {
                    pause();
                }
                List<Object> row = row(message);
                synchronized (received) {
                    received.add(row);
                    received.notifyAll();
                }
            }
        }

        /** Unequal work, so that whatever can overtake does. */
        private void pause() {
            try {
                TimeUnit.MICROSECONDS.sleep(ThreadLocalRandom.current().nextInt(1000 * pauseMsMax));
            } catch (InterruptedException stopping) {
                Thread.currentThread().interrupt();
            }
        }
    }

    private final Map<String, Consumer> consumers = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("push.start", this::start);
        commands.put("push.stop", this::stop);
        commands.put("push.received", this::received);
        commands.put("push.queues", this::queues);
        commands.put("push.client_id", given -> consumers.get(given.text("consumer")).client
            .getDefaultMQPushConsumerImpl().getmQClientFactory().getClientId());
        return commands;
    }

    /** Broker, queue, offset, body text (null if long), tags, keys, message id, body length, time in ns,
     *  topic, times tried before, store time in ms, id of the first one. */
    private static List<Object> row(MessageExt message) {
        byte[] body = message.getBody();
        List<Object> row = new ArrayList<>();
        row.add(message.getBrokerName());
        row.add(message.getQueueId());
        row.add(message.getQueueOffset());
        row.add(body.length > 1000 ? null : new String(body, StandardCharsets.UTF_8));
        row.add(message.getTags());
        row.add(message.getKeys());
        row.add(message.getMsgId());
        row.add(body.length);
        row.add(System.nanoTime());
        row.add(message.getTopic());
        row.add(message.getReconsumeTimes());
        row.add(message.getStoreTimestamp());
        row.add(message.getProperty("ORIGIN_MESSAGE_ID"));
        return row;
    }

    private Object start(Arguments given) throws Exception {
        String name = given.text("consumer");
        DefaultMQPushConsumer client = new DefaultMQPushConsumer(
            given.text("group"), given.hook(), new AllocateMessageQueueAveragely());
        given.configure(client, name);
        client.setConsumeFromWhere(ConsumeFromWhere.valueOf(
            "CONSUME_FROM_" + given.text("from", "FIRST_OFFSET")));
        // 3 s by default; many tests would only wait for that.
        client.getDefaultMQPushConsumerImpl().setPullTimeDelayMillsWhenException(
            given.number("pull_retry_ms", 3_000));
        if (given.has("timestamp")) {
            client.setConsumeTimestamp(given.text("timestamp"));
        }
        if (given.flag("broadcast", false)) {
            setBroadcasting(client);
        }
        client.setConsumeThreadMin(given.integer("threads", 4));
        client.setConsumeThreadMax(given.integer("threads", 4));
        client.setConsumeMessageBatchMaxSize(given.integer("batch", 1));
        for (Map.Entry<String, Object> one : given.map("topics").entrySet()) {
            client.subscribe(one.getKey(), (String) one.getValue());
        }
        for (Map.Entry<String, Object> one : given.map("sql").entrySet()) {
            client.subscribe(one.getKey(), MessageSelector.bySql((String) one.getValue()));
        }
        if (given.has("max_reconsume_times")) {
            client.setMaxReconsumeTimes(given.integer("max_reconsume_times", -1));
        }
        if (!given.flag("client_rebalance", true)) {
            leaveSharing(client);
        }
        Consumer consumer = new Consumer(
            client, given.integer("pause_ms", 0), given.integer("fail_times", 0));
        if (given.flag("orderly", false)) {
            client.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                consumer.receive(messages);
                return consumer.fails(messages)
                    ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            client.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                consumer.receive(messages);
                return consumer.fails(messages)
                    ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        client.start();
        consumers.put(name, consumer);
        return null;
    }

    /** By reflection: the type of the model moved between the releases. */
    private static void setBroadcasting(DefaultMQPushConsumer client) throws Exception {
        for (Method method : DefaultMQPushConsumer.class.getMethods()) {
            if (method.getName().equals("setMessageModel")) {
                method.invoke(client, Beans.convert("BROADCASTING", method.getParameterTypes()[0]));
            }
        }
    }

    /**
     * The broker tells which queues are whose, and whether to pull or to pop; only in 5.x. What was
     * popped and not handled comes again after seconds instead of 10 s to 2 h.
     */
    private static void leaveSharing(DefaultMQPushConsumer client)
        throws ReflectiveOperationException {
        DefaultMQPushConsumer.class.getMethod("setClientRebalance", boolean.class)
            .invoke(client, false);
        Object inner = client.getDefaultMQPushConsumerImpl();
        Field delays = inner.getClass().getDeclaredField("popDelayLevel");
        delays.setAccessible(true);
        Arrays.fill((int[]) delays.get(inner), 1);
    }

    private Object stop(Arguments given) {
        consumers.remove(given.text("consumer")).client.shutdown();
        return null;
    }

    /** Rows from "since" on, once there are "count" in all or "within_ms" have passed. */
    private Object received(Arguments given) throws InterruptedException {
        List<List<Object>> received = consumers.get(given.text("consumer")).received;
        long deadline = System.currentTimeMillis() + given.number("within_ms", 20_000);
        synchronized (received) {
            while (received.size() < given.number("count", 0)) {
                long left = deadline - System.currentTimeMillis();
                if (left <= 0) {
                    break;
                }
                received.wait(left);
            }
            return new ArrayList<>(
                received.subList(given.integer("since", 0), received.size()));
        }
    }

    /** [broker, queue] of each queue of a topic that the consumer holds now, or pops from now. */
    private Object queues(Arguments given) throws ReflectiveOperationException {
        RebalanceImpl rebalance = consumers.get(given.text("consumer")).client
            .getDefaultMQPushConsumerImpl().getRebalanceImpl();
        TreeSet<MessageQueue> held = new TreeSet<>();
        if (given.flag("popped", false)) {
            Object table = RebalanceImpl.class.getMethod("getPopProcessQueueTable").invoke(rebalance);
            ((Map<?, ?>) table).keySet().forEach(queue -> held.add((MessageQueue) queue));
        } else {
            held.addAll(rebalance.getProcessQueueTable().keySet());
        }
        List<Object> rows = new ArrayList<>();
        for (MessageQueue queue : held) {
            if (queue.getTopic().equals(given.text("topic"))) {
                rows.add(List.of(queue.getBrokerName(), queue.getQueueId()));
            }
        }
        return rows;
    }
}
