package penstock;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.hook.SendMessageContext;
import org.apache.rocketmq.client.hook.SendMessageHook;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/**
 * Transactional producers by name. What becomes of a message stands in its properties: "local" is
 * the outcome of the local transaction, "checks" the answers to the first, second, ... question
 * about it, of which the last one stays. Outcomes are commit, rollback, unknown, throw, null.
 */
final class Transactions {
    private static final class Producer implements TransactionListener, SendMessageHook {
        private final TransactionMQProducer client;
        /** By message id the id of the half's place, which the client keeps from its users. */
        private final Map<String, String> places = new ConcurrentHashMap<>();
        private final List<Object> checks = new ArrayList<>();
        private final Map<String, Integer> asked = new HashMap<>();

        private Producer(TransactionMQProducer client) {
            this.client = client;
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return outcome(message.getUserProperty("local"));
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            String[] answers = String.valueOf(message.getUserProperty("checks")).split(",");
            int times;
            synchronized (checks) {
                times = asked.merge(message.getTransactionId(), 1, Integer::sum);
                checks.add(Transactions.describe(message));
                checks.notifyAll();
            }
            return outcome(answers[Math.min(times, answers.length) - 1]);
        }

        @Override
        public String hookName() {
            return "places";
        }

        @Override
        public void sendMessageBefore(SendMessageContext context) {
        }

        @Override
        public void sendMessageAfter(SendMessageContext context) {
            if (context.getSendResult() != null) {
                places.put(context.getSendResult().getMsgId(), context.getSendResult().getOffsetMsgId());
            }
        }
    }

    private final Map<String, Producer> producers = new ConcurrentHashMap<>();
    private final Map<String, TransactionFlood> floods = new ConcurrentHashMap<>();

    Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("tx.start", this::start);
        commands.put("tx.stop", this::stop);
        commands.put("tx.send", this::send);
        commands.put("tx.checks", this::checks);
        commands.put("tx.ask", this::ask);
        commands.put("txflood.start", this::startFlood);
        commands.put("txflood.stop", given -> floods.get(given.text("flood")).stop());
        commands.put("txflood.end", given -> {
            floods.remove(given.text("flood")).end();
            return null;
        });
        return commands;
    }

    private static LocalTransactionState outcome(String name) {
        switch (name) {
            case "commit":
                return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback":
                return LocalTransactionState.ROLLBACK_MESSAGE;
            case "unknown":
                return LocalTransactionState.UNKNOW;
            case "null":
                return null;
            default:
                throw new IllegalStateException("the local transaction says " + name);
        }
    }

    private Object start(Arguments given) throws Exception {
        TransactionMQProducer client = make(given, given.text("producer"));
        Producer producer = new Producer(client);
        client.setTransactionListener(producer);
        client.getDefaultMQProducerImpl().registerSendMessageHook(producer);
        client.start();
        producers.put(given.text("producer"), producer);
        return null;
    }

    /** With "trace", the producer writes what it did to the trace topic. */
    private static TransactionMQProducer make(Arguments given, String name) {
        TransactionMQProducer client = given.flag("trace", false)
            ? new TransactionMQProducer(null, given.text("group"), given.hook(), true, null)
            : new TransactionMQProducer(given.text("group"), given.hook());
        given.configure(client, name);
        client.setSendMsgTimeout(given.integer("timeout_ms", 10_000));
        return client;
    }

    private Object stop(Arguments given) {
        producers.remove(given.text("producer")).client.shutdown();
        return null;
    }

    /** One line per message: its acknowledgement as of a plain producer, or the error it met. */
    private Object send(Arguments given) {
        List<Object> lines = new ArrayList<>();
        for (Object one : given.list("messages")) {
            Message message = Producers.message(new Arguments(Golden.object(one)));
            Producer producer = producers.get(given.text("producer"));
            try {
                TransactionSendResult result =
                    producer.client.sendMessageInTransaction(message, null);
                Map<String, Object> line = Producers.acknowledgement(message, result);
                line.put("offset_msg_id", producer.places.get(result.getMsgId()));
                line.put("transaction_id", result.getTransactionId());
                line.put("state", String.valueOf(result.getLocalTransactionState()));
                lines.add(line);
            } catch (Exception failure) {
                lines.add(Session.describe(failure));
            }
        }
        return lines;
    }

    /** What the broker asked about, from the first question on, once there are "count". */
    private Object checks(Arguments given) throws InterruptedException {
        List<Object> checks = producers.get(given.text("producer")).checks;
        long deadline = System.currentTimeMillis() + given.number("within_ms", 20_000);
        synchronized (checks) {
            while (checks.size() < given.number("count", 0)) {
                long left = deadline - System.currentTimeMillis();
                if (left <= 0) {
                    break;
                }
                checks.wait(left);
            }
            return new ArrayList<>(checks);
        }
    }

    private static Map<String, Object> describe(MessageExt message) {
        Map<String, Object> line = Messages.line(message);
        line.put("time_ms", System.currentTimeMillis());
        line.put("body", new String(message.getBody(), StandardCharsets.UTF_8));
        return line;
    }

    /** Sends any request to "address" over the producer's own connection, and waits for its answer. */
    private Object ask(Arguments given) throws Exception {
        RemotingCommand request =
            RemotingCommand.createRequestCommand(given.integer("code", 0), null);
        given.map("ext").forEach((key, value) -> request.addExtField(key, (String) value));
        RemotingCommand answer = producers.get(given.text("producer")).client
            .getDefaultMQProducerImpl().getmQClientFactory().getMQClientAPIImpl().getRemotingClient()
            .invokeSync(given.text("address"), request, given.number("timeout_ms", 3_000));
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("code", answer.getCode());
        line.put("remark", answer.getRemark());
        line.put("ext", answer.getExtFields());
        return line;
    }

    private Object startFlood(Arguments given) throws Exception {
        TransactionMQProducer client = make(given, given.text("flood"));
        TransactionFlood flood =
            new TransactionFlood(client, given.text("topic"), given.integer("pause_ms", 5));
        flood.start();
        floods.put(given.text("flood"), flood);
        return null;
    }
}
