package penstock;

import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Producers by name, with every way to send, and the queries that a producer offers. */
@SuppressWarnings("deprecation")
final class Producers {
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, Flood> floods = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("producer.start", this::start);
        commands.put("producer.stop", this::stop);
        commands.put("producer.send", this::send);
        commands.put("producer.create_topic", this::createTopic);
        commands.put("producer.query", this::query);
        commands.put("producer.view", given -> Messages.line(
            producer(given).viewMessage(given.text("topic"), given.text("id"))));
        commands.put("flood.start", this::startFlood);
        commands.put("flood.stop", given -> floods.remove(given.text("flood")).stop());
        return commands;
    }

    /** Starts a producer, unless there is one of that name for the same NameServer. */
    private Object start(Arguments given) throws Exception {
        String name = given.text("producer");
        DefaultMQProducer former = producers.get(name);
        if (former != null && former.getNamesrvAddr().equals(given.text("namesrv"))) {
            return null;
        }
        if (former != null) {
            former.shutdown();
        }
        DefaultMQProducer producer =
            new DefaultMQProducer(given.text("group", "group-" + name), given.hook());
        given.configure(producer, name);
        producer.setSendMsgTimeout(given.integer("timeout_ms", 10_000));
        producer.setRetryTimesWhenSendFailed(given.integer("retries", 2));
        producer.setRetryTimesWhenSendAsyncFailed(given.integer("retries", 2));
        producer.setMaxMessageSize(given.integer("body_max", 4 * 1024 * 1024));
        producer.setCompressMsgBodyOverHowmuch(given.integer("compress_over", 4096));
        producer.setDefaultTopicQueueNums(given.integer("queues", 4));
        if (given.has("compress_with")) {
            setCodec(producer, given.text("compress_with"));
        }
        producer.start();
        producers.put(name, producer);
        return null;
    }

    /** By reflection: 4.9 knows only zlib and has no such setting. */
    private static void setCodec(DefaultMQProducer producer, String codec) throws Exception {
        for (Method method : DefaultMQProducer.class.getMethods()) {
            if (method.getName().equals("setCompressType")) {
                method.invoke(producer, Beans.convert(codec, method.getParameterTypes()[0]));
            }
        }
    }

    private Object stop(Arguments given) {
        producers.remove(given.text("producer")).shutdown();
        return null;
    }

    private DefaultMQProducer producer(Arguments given) {
        return producers.get(given.text("producer"));
    }

    /** One line per message: its acknowledgement, or the error it met. */
    private Object send(Arguments given) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (Object one : given.list("messages")) {
            messages.add(message(new Arguments(Golden.object(one))));
        }
        DefaultMQProducer producer = producer(given);
        String how = given.text("how", "sync");
        if (how.equals("batch")) {
            return acknowledgement(messages.get(0), producer.send(messages));
        }
        if (how.equals("async")) {
            return sendAsync(producer, messages);
        }
        List<Object> lines = new ArrayList<>();
        for (Message message : messages) {
            try {
                lines.add(sendOne(producer, message, how, given));
            } catch (Exception failure) {
                lines.add(Session.describe(failure));
            }
        }
        return lines;
    }

    private static Object sendOne(
        DefaultMQProducer producer, Message message, String how, Arguments given)
        throws Exception {
        switch (how) {
            case "oneway":
                producer.sendOneway(message);
                return Map.of();
            case "selector":
                // By the message's own key, as users shard.
                return acknowledgement(message, producer.send(message,
                    (queues, key, shard) -> queues.get(Math.floorMod(shard.hashCode(), queues.size())),
                    message.getUserProperty("shard")));
            case "hash":
                return acknowledgement(message, producer.send(
                    message, new SelectMessageQueueByHash(), message.getUserProperty("shard")));
            case "queue":
                int queue = given.integer("queue_id", 0);
                return acknowledgement(message, producer.send(message,
                    new MessageQueue(message.getTopic(), given.text("broker"), queue)));
            default:
                return acknowledgement(message, producer.send(message));
        }
    }

    private static Object sendAsync(DefaultMQProducer producer, List<Message> messages)
        throws Exception {
        Object[] lines = new Object[messages.size()];
        CountDownLatch answered = new CountDownLatch(lines.length);
        for (int i = 0; i < lines.length; i++) {
            int place = i;
            producer.send(messages.get(i), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    lines[place] = acknowledgement(messages.get(place), result);
                    answered.countDown();
                }

                @Override
                public void onException(Throwable failure) {
                    lines[place] = Session.describe(failure);
                    answered.countDown();
                }
            });
        }
        if (!answered.await(60, TimeUnit.SECONDS)) {
            throw new TimeoutException(answered.getCount() + " sends were never answered");
        }
        return Arrays.asList(lines);
    }

    static Message message(Arguments given) {
        byte[] body;
        if (given.has("size")) {
            body = new byte[given.integer("size", 0)];
            if (given.flag("random", true)) {
                new Random(body.length).nextBytes(body);
            }
        } else {
            body = given.text("body").getBytes(StandardCharsets.UTF_8);
        }
        Message message = new Message(given.text("topic"), body);
        if (given.has("tags")) {
            message.setTags(given.text("tags"));
        }
        if (given.has("keys")) {
            message.setKeys(given.list("keys").stream().map(String::valueOf).toList());
        }
        message.setFlag(given.integer("flag", 0));
        if (given.has("delay_level")) {
            message.setDelayTimeLevel(given.integer("delay_level", 0));
        }
        if (given.has("priority")) {
            setPriority(message, given.integer("priority", 0));
        }
        message.setWaitStoreMsgOK(given.flag("wait_store", true));
        given.map("properties").forEach((key, value) -> message.putUserProperty(key, (String) value));
        return message;
    }

    /** By reflection: 4.9 has no priorities. */
    private static void setPriority(Message message, int priority) {
        try {
            Message.class.getMethod("setPriority", int.class).invoke(message, priority);
        } catch (ReflectiveOperationException failure) {
            throw new UnsupportedOperationException(failure);
        }
    }

    static Map<String, Object> acknowledgement(Message message, SendResult result) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("status", result.getSendStatus().name());
        line.put("broker", result.getMessageQueue().getBrokerName());
        line.put("queue_id", result.getMessageQueue().getQueueId());
        line.put("queue_offset", result.getQueueOffset());
        line.put("msg_id", result.getMsgId());
        line.put("offset_msg_id", result.getOffsetMsgId());
        line.put("region", result.getRegionId());
        line.put("body_crc", UtilAll.crc32(message.getBody()));
        line.put("body_length", message.getBody().length);
        return line;
    }

    /** By reflection: 5.x wants attributes too. */
    private Object createTopic(Arguments given) throws Exception {
        for (Method method : DefaultMQProducer.class.getMethods()) {
            Class<?>[] types = method.getParameterTypes();
            if (!method.getName().equals("createTopic") || types.length > 4
                || types.length == 4 && types[3] == int.class) {
                continue;
            }
            List<Object> values = new ArrayList<>(
                List.of(given.text("template", "TBW102"), given.text("topic"), given.integer("queues", 4)));
            if (types.length == 4) {
                values.add(new HashMap<String, String>());
            }
            return method.invoke(producer(given), values.toArray());
        }
        throw new NoSuchMethodException("createTopic");
    }

    private Object query(Arguments given) throws Exception {
        List<Object> lines = new ArrayList<>();
        for (MessageExt found : producer(given).queryMessage(given.text("topic"), given.text("key"),
                given.integer("count", 32), given.number("from_ms", 0),
                given.number("to_ms", Long.MAX_VALUE)).getMessageList()) {
            lines.add(Messages.line(found));
        }
        return lines;
    }

    private Object startFlood(Arguments given) throws Exception {
        Flood flood = new Flood(producer(given), given.text("topic"), given.integer("pause_ms", 1));
        floods.put(given.text("flood"), flood);
        return flood.start();
    }
}
