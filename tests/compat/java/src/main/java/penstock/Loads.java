package penstock;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Whole topics at once: fill them, read them, and look many keys up. */
@SuppressWarnings("deprecation")
final class Loads {
    Map<String, Session.Command> commands() {
        return Map.of(
            "load.produce", this::produce, "load.consume", this::consume, "load.query", this::query);
    }

    /**
     * Sends messages to "topics" (name and count) and tells of each that was acknowledged.
     *
     * The mix, by position in the topic: every tenth body is large and compressible (the producer
     * compresses it), two in ten messages travel in batches of two, the rest are single and small.
     * All have a tag (tag0..tag4), two keys ("TOPIC-i" and "group-i/10") and user properties, one of
     * them not ASCII. The same "seed" gives the same messages.
     */
    private Object produce(Arguments given) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("penstock-produce");
        given.configure(producer, "load-produce");
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Random random = new Random(given.number("seed", 1));
        List<Object> lines = new ArrayList<>();
        for (Map.Entry<String, Object> one : given.map("topics").entrySet()) {
            int count = Golden.integer(one.getValue());
            for (int i = 0; i < count; ) {
                List<Message> messages = new ArrayList<>();
                messages.add(message(one.getKey(), i++, random));
                SendResult result;
                if (i % 10 == 4 && i < count) {
                    messages.add(message(one.getKey(), i++, random));
                    result = producer.send(messages);
                } else {
                    result = producer.send(messages.get(0));
                }
                if (result.getSendStatus() != SendStatus.SEND_OK) {
                    throw new IllegalStateException(result.toString());
                }
                lines.addAll(acknowledged(messages, result));
            }
        }
        producer.shutdown();
        return lines;
    }

    private static Message message(String topic, int i, Random random) {
        StringBuilder body = new StringBuilder(topic + " message " + i + " ");
        int words = i % 10 == 9 ? 1_000 + random.nextInt(1_000) : random.nextInt(20);
        for (int w = 0; w < words; w++) {
            body.append("word").append(random.nextInt(100)).append(' ');
        }
        Message message = new Message(topic, "tag" + i % 5,
            topic + "-" + i + " group-" + i / 10, body.toString().getBytes(StandardCharsets.UTF_8));
        message.setFlag(i);
        message.putUserProperty("number", String.valueOf(i));
        message.putUserProperty("text", "\u4e2d\u6587 " + i);
        return message;
    }

    private static List<Object> acknowledged(List<Message> messages, SendResult result) {
        // A batch is acknowledged as one: ids joined by commas, the offset of its first message.
        String[] ids = result.getMsgId().split(",");
        String[] offsetIds = result.getOffsetMsgId().split(",");
        List<Object> lines = new ArrayList<>();
        for (int i = 0; i < messages.size(); i++) {
            Message message = messages.get(i);
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("topic", message.getTopic());
            line.put("queue_id", result.getMessageQueue().getQueueId());
            line.put("queue_offset", result.getQueueOffset() + i);
            line.put("msg_id", i < ids.length ? ids[i] : ids[0]);
            line.put("offset_msg_id", offsetIds[i]);
            line.put("batch", messages.size());
            line.put("flag", message.getFlag());
            line.put("keys", message.getKeys());
            line.put("tags", message.getTags());
            // Sending a large body replaces it by its compressed form and then puts it back.
            line.put("body_crc", UtilAll.crc32(message.getBody()));
            line.put("body_length", message.getBody().length);
            lines.add(line);
        }
        return lines;
    }

    /** Every message of "topics"; the group "commit_as", if given, then has consumed them all. */
    private Object consume(Arguments given) throws Exception {
        DefaultMQPullConsumer consumer =
            new DefaultMQPullConsumer(given.text("commit_as", "penstock-consume-all"));
        given.configure(consumer, "load-consume");
        consumer.start();
        List<Object> lines = new ArrayList<>();
        for (Object topic : given.list("topics")) {
            for (MessageQueue queue
                    : new TreeSet<>(consumer.fetchSubscribeMessageQueues((String) topic))) {
                long end = consumer.maxOffset(queue);
                for (long at = consumer.minOffset(queue); at < end; ) {
                    PullResult result = consumer.pull(queue, "*", at, 32);
                    if (result.getPullStatus() == PullStatus.FOUND) {
                        result.getMsgFoundList().forEach(one -> lines.add(Messages.line(one)));
                    }
                    if (result.getNextBeginOffset() <= at) {
                        throw new IllegalStateException(queue + " stuck at " + at + ": " + result);
                    }
                    at = result.getNextBeginOffset();
                }
                if (given.has("commit_as")) {
                    consumer.getOffsetStore().updateConsumeOffsetToBroker(queue, end, false);
                }
            }
        }
        consumer.shutdown();
        return lines;
    }

    /** What the broker's index finds in "topic" for each of "keys". */
    private Object query(Arguments given) throws Exception {
        DefaultMQProducer client = new DefaultMQProducer("penstock-query");
        given.configure(client, "load-query");
        client.start();
        List<Object> lines = new ArrayList<>();
        for (Object key : given.list("keys")) {
            try {
                for (MessageExt message : client.queryMessage(
                        given.text("topic"), (String) key, 64, 0, Long.MAX_VALUE).getMessageList()) {
                    Map<String, Object> line = new LinkedHashMap<>();
                    line.put("key", key);
                    line.putAll(Messages.line(message));
                    lines.add(line);
                }
            } catch (MQClientException none) {
                // The client reports "nothing found" as an exception; anything else is ours.
                if (none.getResponseCode() != 208 && none.getResponseCode() != 22) {
                    throw none;
                }
            }
        }
        client.shutdown();
        return lines;
    }
}
