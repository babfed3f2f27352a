package penstock;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Pull consumers by name: the client that leaves offsets and queues to its user. */
@SuppressWarnings("deprecation")
final class PullConsumers {
    private final Map<String, DefaultMQPullConsumer> consumers = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("pull.start", this::start);
        commands.put("pull.stop", this::stop);
        commands.put("pull.queues", this::queues);
        commands.put("pull.messages", this::messages);
        commands.put("pull.search", given ->
            consumer(given).searchOffset(queue(given), given.number("timestamp_ms", 0)));
        commands.put("pull.commit", this::commit);
        commands.put("pull.committed", given ->
            consumer(given).fetchConsumeOffset(queue(given), true));
        return commands;
    }

    /** Starts a consumer, unless there is one of that name. */
    private Object start(Arguments given) throws Exception {
        String name = given.text("consumer");
        if (consumers.containsKey(name)) {
            return null;
        }
        DefaultMQPullConsumer consumer =
            new DefaultMQPullConsumer(given.text("group"), given.hook());
        given.configure(consumer, name);
        consumer.start();
        consumers.put(name, consumer);
        return null;
    }

    private Object stop(Arguments given) {
        consumers.remove(given.text("consumer")).shutdown();
        return null;
    }

    private DefaultMQPullConsumer consumer(Arguments given) {
        return consumers.get(given.text("consumer"));
    }

    private static MessageQueue queue(Arguments given) {
        return new MessageQueue(
            given.text("topic"), given.text("broker"), given.integer("queue_id", 0));
    }

    private Object queues(Arguments given) throws Exception {
        DefaultMQPullConsumer consumer = consumer(given);
        List<Object> lines = new ArrayList<>();
        for (MessageQueue queue
                : new TreeSet<>(consumer.fetchSubscribeMessageQueues(given.text("topic")))) {
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("broker", queue.getBrokerName());
            line.put("queue_id", queue.getQueueId());
            line.put("min", consumer.minOffset(queue));
            line.put("max", consumer.maxOffset(queue));
            line.put("earliest_ms", consumer.earliestMsgStoreTime(queue));
            lines.add(line);
        }
        return lines;
    }

    private Object messages(Arguments given) throws Exception {
        DefaultMQPullConsumer consumer = consumer(given);
        String expression = given.text("expression", "*");
        long offset = given.number("offset", 0);
        int count = given.integer("count", 32);
        PullResult result = given.has("sql")
            ? consumer.pull(queue(given), MessageSelector.bySql(given.text("sql")), offset, count)
            : given.flag("wait", false)
            ? consumer.pullBlockIfNotFound(queue(given), expression, offset, count)
            : consumer.pull(queue(given), expression, offset, count);
        List<Object> lines = new ArrayList<>();
        if (result.getMsgFoundList() != null) {
            for (MessageExt message : result.getMsgFoundList()) {
                lines.add(Messages.line(message));
            }
        }
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("status", result.getPullStatus().name());
        told.put("next", result.getNextBeginOffset());
        told.put("min", result.getMinOffset());
        told.put("max", result.getMaxOffset());
        told.put("messages", lines);
        return told;
    }

    private Object commit(Arguments given) throws Exception {
        consumer(given).getOffsetStore()
            .updateConsumeOffsetToBroker(queue(given), given.number("offset", 0), false);
        return null;
    }
}
