package penstock;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Consumers in order by name. Every call of a listener is noted with its beginning and its end, by
 * group; the notes stay when a consumer leaves. A message with the property "fail" n is refused
 * n times: the queue is suspended for "suspend_ms".
 */
final class OrderlyConsumers {
    private static final class Listener implements MessageListenerOrderly {
        private final String name;
        private final List<List<Object>> calls;
        private final int workMs;
        private final int suspendMs;

        private Listener(String name, List<List<Object>> calls, Arguments given) {
            this.name = name;
            this.calls = calls;
            this.workMs = given.integer("work_ms", 0);
            this.suspendMs = given.integer("suspend_ms", 50);
        }

        /** Notes [consumer, broker, queue, offset, body, times tried, succeeded, from ns, to ns]. */
        @Override
        public ConsumeOrderlyStatus consumeMessage(
            List<MessageExt> messages, ConsumeOrderlyContext context) {
            long from = System.nanoTime();
            MessageExt message = messages.get(0);
            String fail = message.getUserProperty("fail");
            boolean fine = fail == null || message.getReconsumeTimes() >= Integer.parseInt(fail);
            List<Object> call = new ArrayList<>();
            call.add(name);
            call.add(message.getBrokerName());
            call.add(message.getQueueId());
            call.add(message.getQueueOffset());
            call.add(new String(message.getBody(), StandardCharsets.UTF_8));
            call.add(message.getReconsumeTimes());
            call.add(fine);
            call.add(from);
            work();
            call.add(System.nanoTime());
            synchronized (calls) {
                calls.add(call);
            }
            context.setSuspendCurrentQueueTimeMillis(suspendMs);
            return fine ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
        }

        private void work() {
            try {
                TimeUnit.MILLISECONDS.sleep(workMs);
            } catch (InterruptedException stopping) {
                Thread.currentThread().interrupt();
            }
        }
    }

    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();
    private final Map<String, List<List<Object>>> calls = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("orderly.start", this::start);
        commands.put("orderly.stop", this::stop);
        commands.put("orderly.calls", this::calls);
        return commands;
    }

    private Object start(Arguments given) throws Exception {
        String name = given.text("consumer");
        String group = given.text("group");
        DefaultMQPushConsumer client =
            new DefaultMQPushConsumer(group, given.hook(), new AllocateMessageQueueAveragely());
        given.configure(client, name);
        client.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        client.setConsumeThreadMin(4);
        client.setConsumeThreadMax(4);
        if (given.has("max_reconsume_times")) {
            client.setMaxReconsumeTimes(given.integer("max_reconsume_times", -1));
        }
        client.subscribe(given.text("topic"), "*");
        client.registerMessageListener(new Listener(
            name, calls.computeIfAbsent(group, new_ -> new ArrayList<>()), given));
        client.start();
        consumers.put(name, client);
        return null;
    }

    private Object stop(Arguments given) {
        consumers.remove(given.text("consumer")).shutdown();
        return null;
    }

    /** The calls of a group's listeners from "since" on, in the order of their ends. */
    private Object calls(Arguments given) {
        List<List<Object>> all = calls.get(given.text("group"));
        synchronized (all) {
            return new ArrayList<>(all.subList(given.integer("since", 0), all.size()));
        }
    }
}
