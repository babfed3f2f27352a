package penstock;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Lite pull consumers by name, which share a topic's queues or take all of them ("assign"). */
final class LiteConsumers {
    private final Map<String, DefaultLitePullConsumer> consumers = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("lite.start", this::start);
        commands.put("lite.stop", this::stop);
        commands.put("lite.poll", this::poll);
        commands.put("lite.seek", this::seek);
        commands.put("lite.commit", this::commit);
        commands.put("lite.committed", this::committed);
        return commands;
    }

    private Object start(Arguments given) throws Exception {
        String name = given.text("consumer");
        DefaultLitePullConsumer consumer =
            new DefaultLitePullConsumer(given.text("group"), given.hook());
        given.configure(consumer, name);
        consumer.setAutoCommit(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        String topic = given.text("topic");
        if (given.has("sql")) {
            consumer.subscribe(topic, MessageSelector.bySql(given.text("sql")));
        } else if (!given.flag("assign", false)) {
            consumer.subscribe(topic, given.text("expression", "*"));
        }
        consumer.start();
        if (given.flag("assign", false)) {
            consumer.assign(consumer.fetchMessageQueues(topic));
        }
        consumers.put(name, consumer);
        return null;
    }

    private Object stop(Arguments given) {
        consumers.remove(given.text("consumer")).shutdown();
        return null;
    }

    /** Polls until "count" messages are there or "within_ms" have passed. */
    private Object poll(Arguments given) {
        DefaultLitePullConsumer consumer = consumers.get(given.text("consumer"));
        long deadline = System.currentTimeMillis() + given.number("within_ms", 20_000);
        List<Object> lines = new ArrayList<>();
        while (lines.size() < given.number("count", 1) && System.currentTimeMillis() < deadline) {
            for (MessageExt message : consumer.poll(200)) {
                lines.add(Messages.line(message));
            }
        }
        return lines;
    }

    private Object seek(Arguments given) throws Exception {
        DefaultLitePullConsumer consumer = consumers.get(given.text("consumer"));
        for (MessageQueue queue : consumer.assignment()) {
            consumer.seek(queue, given.number("offset", 0));
        }
        return null;
    }

    private Object commit(Arguments given) {
        consumers.get(given.text("consumer")).commitSync();
        return null;
    }

    /** The sum of the committed offsets of the consumer's queues. */
    private Object committed(Arguments given) throws Exception {
        DefaultLitePullConsumer consumer = consumers.get(given.text("consumer"));
        long sum = 0;
        for (MessageQueue queue : consumer.assignment()) {
            sum += Math.max(0, consumer.committed(queue));
        }
        return sum;
    }
}
