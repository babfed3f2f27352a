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
import java.util.concurrent.atomic.AtomicLong;
import java.util.regex.Pattern;
import org.apache.rocketmq.acl.common.AclUtils;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.impl.consumer.DefaultMQPushConsumerImpl;
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
import penstock.Shutdowns;

/**
 * Many mqadmin commands in one process. Argument: the name server, for the clients below.
 *
 * Every line of standard input is a JSON list: a time limit in ms, a pattern, then the command and
 * its arguments. Some commands never end: one is interrupted when its time is up or when what it
 * printed has a match of the pattern (empty: none). The answer is one JSON line with what it
 * printed ("out", "err") and whether its time was up ("late").
 * Commands that start with a plus sign are not mqadmin's: they run the live clients that mqadmin's
 * commands look at.
 *
 *   +produce GROUP TOPIC QUEUE BODY KEYS TAGS   prints the message's ids and its offset
 *   +trace GROUP TOPIC BODY                     the same for a message that leaves a trace,
 *   +delay GROUP TOPIC BODY MS                  for one that comes so much later,
 *   +transact GROUP TOPIC BODY END              and for one in a transaction that ends so
 *   +consume GROUP TOPIC EXPRESSION MODEL       a push consumer from the first offset on; the model
 *                                               POP lets the server choose, TRACED leaves traces
 *   +consumed GROUP COUNT                       waits for so many messages, then commits
 *   +leave GROUP                                ends that consumer
 *
 * System.exit is not guarded against: mqadmin calls it for bad arguments only.
 */
public final class AdminShell extends MQAdminStartup {
    private final String names;
    private final RPCHook hook;
    private final Map<String, DefaultMQProducer> producers = new LinkedHashMap<>();
    private final Map<String, Consumer> consumers = new LinkedHashMap<>();
    private final SpecialProducers special;

    private AdminShell(String names) {
        this.names = names;
        String home = System.getProperty(MixAll.ROCKETMQ_HOME_PROPERTY);
        this.hook = AclUtils.getAclRPCHook(home + MixAll.ACL_CONF_TOOLS_FILE);
        this.special = new SpecialProducers(names, hook);
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
            request.subList(2, request.size()).forEach(word -> words.add(word.toString()));
            String enough = (String) request.get(1);
            answers.println(Json.write(run(words, (Long) request.get(0), enough)));
            answers.flush();
            System.setOut(outer);
            System.setErr(outer);
        }
    }

    private Map<String, Object> run(List<String> words, long limitMs, String enough)
        throws Exception {
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
        Pattern pattern = Pattern.compile(enough);
        long end = System.nanoTime() + limitMs * 1_000_000;
        boolean late = false;
        while (command.isAlive()) {
            command.join(20);
            Shutdowns.hurry(command);
            late |= System.nanoTime() > end;
            String printed = out.toString(StandardCharsets.UTF_8);
            if (late || !enough.isEmpty() && pattern.matcher(printed).find()) {
                command.interrupt();
            }
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("out", out.toString(StandardCharsets.UTF_8));
        answer.put("err", err.toString(StandardCharsets.UTF_8));
        answer.put("late", late);
        return answer;
    }

    private void execute(List<String> words) throws Exception {
        switch (words.get(0)) {
            case "+produce" -> produce(words);
            case "+trace", "+delay", "+transact" -> print(special.run(words));
            case "+consume" -> consume(words);
            case "+consumed" -> consumers.get(words.get(1)).await(Long.parseLong(words.get(2)));
            case "+leave" -> consumers.remove(words.get(1)).client.shutdown();
            default -> {
                // Some keep the connection of their first use, which is closed at its end.
                SUB_COMMANDS.clear();
                MQAdminStartup.main(words.toArray(new String[0]));
            }
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
        print(producer.send(message,
            (queues, ignored, alsoIgnored) -> queueOf(queues, wanted), null));
    }

    private static void print(SendResult result) {
        System.out.println(result.getMsgId());
        System.out.println(result.getOffsetMsgId());
        System.out.println(result.getQueueOffset());
    }

    private static MessageQueue queueOf(List<MessageQueue> queues, int id) {
        return queues.stream().filter(queue -> queue.getQueueId() == id).findFirst().orElseThrow();
    }

    private void consume(List<String> words) throws Exception {
        String model = words.get(4);
        DefaultMQPushConsumer client = new DefaultMQPushConsumer(words.get(1), hook,
            new AllocateMessageQueueAveragely(), model.equals("TRACED"), null);
        client.setNamesrvAddr(names);
        client.setInstanceName(words.get(1));
        client.setClientRebalance(!model.equals("POP"));
        client.setMessageModel(model.equals("BROADCASTING")
            ? MessageModel.BROADCASTING : MessageModel.CLUSTERING);
        client.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        client.subscribe(words.get(2), words.get(3));
        Consumer consumer = new Consumer(client, new AtomicLong());
        client.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            consumer.count.addAndGet(messages.size());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        client.start();
        consumers.put(words.get(1), consumer);
    }

    private record Consumer(DefaultMQPushConsumer client, AtomicLong count) {
        void await(long wanted) throws InterruptedException {
            DefaultMQPushConsumerImpl inner = client.getDefaultMQPushConsumerImpl();
            // A message is listened to first and then removed from its queue, which moves the offset.
            while (count.get() < wanted || inner.consumerRunningInfo().getMqTable().values().stream()
                .anyMatch(queue -> queue.getCachedMsgCount() > 0)) {
                Thread.sleep(10);
            }
            inner.persistConsumerOffset();
        }
    }
}
