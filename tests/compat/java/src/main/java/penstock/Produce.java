package penstock;

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.Message;

/**
 * Sends messages with the real producer and prints one JSON line for each that was acknowledged.
 * Arguments: name server, topics ("a:1000,b:500"), seed.
 *
 * The mix, by position in the topic: every tenth body is large and compressible (the producer
 * compresses it), two in ten messages travel in batches of two, the rest are single and small.
 * All have a tag (tag0..tag4), two keys ("TOPIC-i" and "group-i/10") and user properties, one of
 * them not ASCII. The same seed gives the same messages.
 */
public final class Produce {
    private Produce() {
    }

    public static void main(String[] args) {
        Program.run(out -> run(args, out));
    }

    private static void run(String[] args, PrintStream out) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("penstock-produce");
        producer.setNamesrvAddr(args[0]);
        producer.setInstanceName("produce-" + ProcessHandle.current().pid());
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Random random = new Random(Long.parseLong(args[2]));
        for (String part : args[1].split(",")) {
            String topic = part.substring(0, part.indexOf(':'));
            int count = Integer.parseInt(part.substring(topic.length() + 1));
            for (int i = 0; i < count; ) {
                List<Message> messages = new ArrayList<>();
                messages.add(message(topic, i++, random));
                SendResult result;
                if (i % 10 == 4 && i < count) {
                    messages.add(message(topic, i++, random));
                    result = producer.send(messages);
                } else {
                    result = producer.send(messages.get(0));
                }
                if (result.getSendStatus() != SendStatus.SEND_OK) {
                    throw new IllegalStateException(result.toString());
                }
                print(out, messages, result);
            }
        }
        producer.shutdown();
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

    private static void print(PrintStream out, List<Message> messages, SendResult result) {
        // A batch is acknowledged as one: ids joined by commas, the offset of its first message.
        String[] ids = result.getMsgId().split(",");
        String[] offsetIds = result.getOffsetMsgId().split(",");
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
            out.println(Json.write(line));
        }
    }
}
