package penstock.server;

import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.acl.common.AclUtils;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import penstock.Json;
import penstock.Program;

/**
 * Many mqadmin commands in one process. Argument: the name server, for the clients below.
 *
 * Every line of standard input is a JSON list: the time limit in ms, then the command and its
 * arguments. The answer is one JSON line with what it printed ("out", "err") and whether it was
 * still running when the time was up and had to be "interrupted": some commands never end.
 * Commands that start with a plus sign are not mqadmin's: they run the live clients that mqadmin's
 * commands look at.
 *
 *   +produce GROUP TOPIC QUEUE BODY KEYS TAGS   prints the ids of the message, and its offset
 *   +consume GROUP TOPIC EXPRESSION MODEL       a push consumer from the first offset on
 *   +leave GROUP                                ends that consumer
 *
 * System.exit is not guarded against: mqadmin calls it for bad arguments only.
 */
public final class AdminShell {
    private final String names;
    private final RPCHook hook;
    private final Map<String, DefaultMQProducer> producers = new LinkedHashMap<>();
    private final Map<String, DefaultMQPushConsumer> consumers = new LinkedHashMap<>();

    private AdminShell(String names) {
        this.names = names;
        String home = System.getProperty(MixAll.ROCKETMQ_HOME_PROPERTY);
        this.hook = AclUtils.getAclRPCHook(home + MixAll.ACL_CONF_TOOLS_FILE);
    }

    public static void main(String[] args) {
        Program.run(out -> new AdminShell(args[0]).serve(out));
    }

    private void serve(PrintStream answers) throws Exception {
        BufferedReader lines =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream outer = System.err;
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            List<?> request = (List<?>) Json.parse(line);
            List<String> words = new ArrayList<>();
            request.subList(1, request.size()).forEach(word -> words.add(word.toString()));
            answers.println(Json.write(run(words, (Long) request.get(0))));
            answers.flush();
            System.setOut(outer);
            System.setErr(outer);
        }
    }

    private Map<String, Object> run(List<String> words, long limitMs) throws Exception {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        ByteArrayOutputStream err = new ByteArrayOutputStream();
        System.setOut(new PrintStream(out, true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(err, true, StandardCharsets.UTF_8));
        Thread command = new Thread(() -> {
            try {
                execute(words);
            } catch (Throwable thrown) {
                thrown.printStackTrace();
            }
        });
        command.start();
        command.join(limitMs);
        boolean interrupted = command.isAlive();
        if (interrupted) {
            command.interrupt();
            command.join(limitMs);
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("out", out.toString(StandardCharsets.UTF_8));
        answer.put("err", err.toString(StandardCharsets.UTF_8));
        answer.put("interrupted", interrupted);
        return answer;
    }

    private void execute(List<String> words) throws Exception {
        switch (words.get(0)) {
            case "+produce" -> produce(words);
            case "+consume" -> consume(words);
            case "+leave" -> consumers.remove(words.get(1)).shutdown();
            default -> MQAdminStartup.main(words.toArray(new String[0]));
        }
    }

    private void produce(List<String> words) throws Exception {
        DefaultMQProducer producer = producers.get(words.get(1));
        if (producer == null) {
            producer = new DefaultMQProducer(words.get(1), hook);
            producer.setNamesrvAddr(names);
            producer.setInstanceName(words.get(1));
            producer.start();
            producers.put(words.get(1), producer);
        }
        Message message = new Message(words.get(2), words.get(6), words.get(5),
            words.get(4).getBytes(StandardCharsets.UTF_8));
        int wanted = Integer.parseInt(words.get(3));
        SendResult result = producer.send(message,
            (queues, ignored, alsoIgnored) -> queueOf(queues, wanted), null);
        System.out.println(result.getMsgId());
        System.out.println(result.getOffsetMsgId());
        System.out.println(result.getQueueOffset());
    }

    private static MessageQueue queueOf(List<MessageQueue> queues, int id) {
        return queues.stream().filter(queue -> queue.getQueueId() == id).findFirst().orElseThrow();
    }

    private void consume(List<String> words) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(words.get(1), hook);
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName(words.get(1));
        consumer.setMessageModel(MessageModel.valueOf(words.get(4)));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(words.get(2), words.get(3));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
            ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
        consumer.start();
        consumers.put(words.get(1), consumer);
    }
}
