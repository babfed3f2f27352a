package penstock;

import java.io.PrintStream;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Asks the broker's index for keys and prints every message found as a JSON line, with the key
 * as "key". Arguments: name server, topic, keys ("a,b").
 */
@SuppressWarnings("deprecation")
public final class QueryKey {
    private QueryKey() {
    }

    public static void main(String[] args) {
        Program.run(out -> run(args, out));
    }

    private static void run(String[] args, PrintStream out) throws Exception {
        DefaultMQProducer client = new DefaultMQProducer("penstock-query");
        client.setNamesrvAddr(args[0]);
        client.setInstanceName("query-" + ProcessHandle.current().pid());
        client.start();
        for (String key : args[2].split(",")) {
            try {
                for (MessageExt message : client
                        .queryMessage(args[1], key, 64, 0, Long.MAX_VALUE).getMessageList()) {
                    Map<String, Object> line = new LinkedHashMap<>();
                    line.put("key", key);
                    line.putAll(ConsumeAll.line(message));
                    out.println(Json.write(line));
                }
            } catch (MQClientException none) {
                // The client reports "nothing found" as an exception; anything else is ours.
                if (none.getResponseCode() != 208 && none.getResponseCode() != 22) {
                    throw none;
                }
            }
        }
        client.shutdown();
    }
}
