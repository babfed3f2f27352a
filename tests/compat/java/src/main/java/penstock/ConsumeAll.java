package penstock;

import java.io.PrintStream;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Reads every message of the given topics from the lowest to the highest offset with the real
 * pull consumer and prints each as a JSON line. Arguments: name server, topics ("a,b"), and
 * optionally a consumer group whose offsets are then committed to the end of every queue.
 */
@SuppressWarnings("deprecation")
public final class ConsumeAll {
    private ConsumeAll() {
    }

    public static void main(String[] args) {
        Program.run(out -> run(args, out));
    }

    private static void run(String[] args, PrintStream out) throws Exception {
        String group = args.length > 2 ? args[2] : "penstock-consume-all";
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group);
        consumer.setNamesrvAddr(args[0]);
        consumer.setInstanceName("consume-" + ProcessHandle.current().pid());
        consumer.start();
        for (String topic : args[1].split(",")) {
            for (MessageQueue queue : new TreeSet<>(consumer.fetchSubscribeMessageQueues(topic))) {
                long end = consumer.maxOffset(queue);
                for (long at = consumer.minOffset(queue); at < end; ) {
                    PullResult result = consumer.pull(queue, "*", at, 32);
                    if (result.getPullStatus() == PullStatus.FOUND) {
                        for (MessageExt message : result.getMsgFoundList()) {
                            out.println(Json.write(line(message)));
                        }
                    }
                    if (result.getNextBeginOffset() <= at) {
                        throw new IllegalStateException(queue + " stuck at " + at + ": " + result);
                    }
                    at = result.getNextBeginOffset();
                }
                if (args.length > 2) {
                    consumer.getOffsetStore().updateConsumeOffsetToBroker(queue, end, false);
                }
            }
        }
        consumer.shutdown();
    }

    public static Map<String, Object> line(MessageExt message) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("topic", message.getTopic());
        line.put("queue_id", message.getQueueId());
        line.put("queue_offset", message.getQueueOffset());
        line.put("physical_offset", message.getCommitLogOffset());
        line.put("store_size", message.getStoreSize());
        line.put("msg_id", message.getMsgId());
        line.put("flag", message.getFlag());
        line.put("sys_flag", message.getSysFlag());
        line.put("born_timestamp", message.getBornTimestamp());
        line.put("store_timestamp", message.getStoreTimestamp());
        line.put("reconsume_times", message.getReconsumeTimes());
        line.put("keys", message.getKeys());
        line.put("tags", message.getTags());
        line.put("properties", message.getProperties());
        line.put("stored_body_crc", message.getBodyCRC());
        line.put("body_crc", UtilAll.crc32(message.getBody()));
        line.put("body_length", message.getBody().length);
        line.put("born_host", message.getBornHostString());
        line.put("transaction_id", message.getTransactionId());
        line.put("prepared_offset", message.getPreparedTransactionOffset());
        return line;
    }
}
