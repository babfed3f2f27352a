package penstock;

import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;

/**
 * Producers of messages for a time, and the recall of them. What 4.9 does not have is called by
 * reflection; there the times are plain properties.
 */
final class Timers {
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("timer.start", this::start);
        commands.put("timer.send", this::send);
        commands.put("timer.recall", this::recall);
        return commands;
    }

    /** Starts a producer, unless there is one of that name. */
    private Object start(Arguments given) throws Exception {
        String name = given.text("producer");
        if (!producers.containsKey(name)) {
            DefaultMQProducer producer = new DefaultMQProducer("group-" + name);
            given.configure(producer, name);
            producer.setSendMsgTimeout(10_000);
            producer.start();
            producers.put(name, producer);
        }
        return null;
    }

    /** One line per message: what it was answered, and the time right before it was sent. */
    private Object send(Arguments given) throws Exception {
        DefaultMQProducer producer = producers.get(given.text("producer"));
        List<Object> lines = new ArrayList<>();
        for (Object one : given.list("messages")) {
            Message message = message(new Arguments(Golden.object(one)));
            Map<String, Object> line = new LinkedHashMap<>();
            long began = System.currentTimeMillis();
            try {
                line.putAll(acknowledgement(producer.send(message)));
            } catch (Exception failure) {
                line.putAll(Session.describe(failure));
            }
            line.put("began_ms", began);
            line.put("ended_ms", System.currentTimeMillis());
            lines.add(line);
        }
        return lines;
    }

    private static Message message(Arguments given) throws ReflectiveOperationException {
        Message message =
            new Message(given.text("topic"), given.text("body").getBytes(StandardCharsets.UTF_8));
        if (given.has("tags")) {
            message.setTags(given.text("tags"));
        }
        if (given.has("keys")) {
            message.setKeys(given.text("keys"));
        }
        // The setters of 5.x by name: setDelayTimeMs, setDelayTimeSec, setDeliverTimeMs.
        for (Map.Entry<String, Object> one : given.map("set").entrySet()) {
            Message.class.getMethod(one.getKey(), long.class).invoke(message, one.getValue());
        }
        given.map("properties").forEach(
            (name, value) -> MessageAccessor.putProperty(message, name, (String) value));
        if (given.has("delay_level")) {
            message.setDelayTimeLevel(given.integer("delay_level", 0));
        }
        return message;
    }

    private static Map<String, Object> acknowledgement(SendResult result)
        throws ReflectiveOperationException {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("status", result.getSendStatus().name());
        line.put("broker", result.getMessageQueue().getBrokerName());
        line.put("queue_id", result.getMessageQueue().getQueueId());
        line.put("queue_offset", result.getQueueOffset());
        line.put("msg_id", result.getMsgId());
        line.put("offset_msg_id", result.getOffsetMsgId());
        line.put("recall_handle", handle(result));
        return line;
    }

    private static Object handle(SendResult result) throws ReflectiveOperationException {
        try {
            return SendResult.class.getMethod("getRecallHandle").invoke(result);
        } catch (NoSuchMethodException absent) {
            return null;
        }
    }

    /** For each handle the id of the message that shall not come, or the error it met. */
    private Object recall(Arguments given) throws ReflectiveOperationException {
        DefaultMQProducer producer = producers.get(given.text("producer"));
        List<Object> lines = new ArrayList<>();
        for (Object handle : given.list("handles")) {
            try {
                lines.add(Map.of("msg_id", DefaultMQProducer.class
                    .getMethod("recallMessage", String.class, String.class)
                    .invoke(producer, given.text("topic"), handle)));
            } catch (InvocationTargetException refused) {
                lines.add(Session.describe(refused.getCause()));
            }
        }
        return lines;
    }
}
