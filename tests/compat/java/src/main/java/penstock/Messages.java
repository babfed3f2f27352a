package penstock;

import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageExt;

/** Messages as the answers of commands show them. */
public final class Messages {
    private Messages() {
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
