package penstock.server;

import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/** Producers of messages that are more than plain ones, for mqadmin to look at. */
final class SpecialProducers {
    private final String names;
    private final RPCHook hook;
    private final Map<String, DefaultMQProducer> producers = new LinkedHashMap<>();

    SpecialProducers(String names, RPCHook hook) {
        this.names = names;
        this.hook = hook;
    }

    /** Carries out a command: its group, topic, body (also the key), and more. */
    SendResult run(List<String> words) throws Exception {
        String group = words.get(1);
        String topic = words.get(2);
        String body = words.get(3);
        return switch (words.get(0)) {
            case "+trace" -> trace(group, topic, body);
            case "+delay" -> delay(group, topic, body, Long.parseLong(words.get(4)));
            case "+transact" -> transact(group, topic, body, words.get(4));
            default -> throw new IllegalArgumentException(words.get(0));
        };
    }

    /** With a trace of what became of it. */
    private SendResult trace(String group, String topic, String body) throws Exception {
        return started(group, new DefaultMQProducer(group, hook, true, null))
            .send(message(topic, body));
    }

    /** For a time so many ms ahead. */
    private SendResult delay(String group, String topic, String body, long delayMs) throws Exception {
        Message message = message(topic, body);
        message.setDelayTimeMs(delayMs);
        return started(group, new DefaultMQProducer(group, hook)).send(message);
    }

    /** In a transaction that ends like this. */
    private SendResult transact(String group, String topic, String body, String end) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group, hook);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object given) {
                return LocalTransactionState.valueOf((String) given);
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
        return started(group, producer).sendMessageInTransaction(message(topic, body), end);
    }

    private static Message message(String topic, String body) {
        Message message = new Message(topic, body.getBytes(StandardCharsets.UTF_8));
        message.setKeys(body);
        return message;
    }

    /** The producer of that group: this one, unless there is one. */
    private DefaultMQProducer started(String group, DefaultMQProducer fresh) throws Exception {
        if (!producers.containsKey(group)) {
            fresh.setNamesrvAddr(names);
            fresh.setInstanceName(group);
            fresh.start();
            producers.put(group, fresh);
        }
        return producers.get(group);
    }
}
