package penstock.server;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.impl.ClientRemotingProcessor;
import org.apache.rocketmq.client.impl.mqclient.MQClientAPIExt;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.NotificationRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;
import penstock.Arguments;
import penstock.Session;

/**
 * The requests of POP one by one, as the proxy sends them: "broker" and "address" name the broker,
 * "topic" and "group" whose messages it is about.
 */
public final class Pops {
    private static final long CALL_MS = 10_000;

    private final Map<String, MQClientAPIExt> clients = new ConcurrentHashMap<>();

    public Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("pop.start", this::start);
        commands.put("pop.messages", this::pop);
        commands.put("pop.ack", this::ack);
        commands.put("pop.ack_several", this::ackSeveral);
        commands.put("pop.change", this::change);
        commands.put("pop.notify", this::waitForMessages);
        return commands;
    }

    /** Starts a client, unless there is one of that name. */
    private Object start(Arguments given) {
        clients.computeIfAbsent(given.text("client"), name -> {
            ClientConfig config = new ClientConfig();
            given.configure(config, name);
            MQClientAPIExt client = new MQClientAPIExt(
                config, new NettyClientConfig(), new ClientRemotingProcessor(null), given.hook());
            client.start();
            return client;
        });
        return null;
    }

    /** Messages of "queue_id" or of all queues; waits for them if "poll_ms" is given. */
    private Object pop(Arguments given) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setTopic(given.text("topic"));
        header.setConsumerGroup(given.text("group"));
        header.setQueueId(given.integer("queue_id", -1));
        header.setMaxMsgNums(given.integer("count", 32));
        header.setInvisibleTime(given.number("invisible_ms", 60_000));
        header.setInitMode(given.integer("init_mode", 0));
        header.setExpType(given.text("exp_type", "TAG"));
        header.setExp(given.text("exp", "*"));
        header.setOrder(given.flag("order", false));
        header.setAttemptId(given.has("attempt_id") ? given.text("attempt_id") : null);
        header.setPollTime(given.number("poll_ms", 0));
        header.setBornTime(System.currentTimeMillis());
        long timeout = CALL_MS + header.getPollTime();
        PopResult result = await(clients.get(given.text("client")).popMessageAsync(
            given.text("address"), given.text("broker"), header, timeout), timeout);
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("status", result.getPopStatus().name());
        told.put("pop_ms", result.getPopTime());
        told.put("invisible_ms", result.getInvisibleTime());
        told.put("rest", result.getRestNum());
        List<Object> messages = new ArrayList<>();
        if (result.getMsgFoundList() != null) {
            result.getMsgFoundList().forEach(message -> messages.add(tell(message)));
        }
        told.put("messages", messages);
        return told;
    }

    private static Map<String, Object> tell(MessageExt message) {
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("body", new String(message.getBody(), StandardCharsets.UTF_8));
        told.put("topic", message.getTopic());
        told.put("queue_id", message.getQueueId());
        told.put("queue_offset", message.getQueueOffset());
        told.put("msg_id", message.getMsgId());
        told.put("tags", message.getTags());
        told.put("times", message.getReconsumeTimes());
        told.put("receipt", message.getProperty(MessageConst.PROPERTY_POP_CK));
        told.put("first_pop", message.getProperty(MessageConst.PROPERTY_FIRST_POP_TIME));
        told.put("broker", message.getBrokerName());
        told.put("seen_ms", System.currentTimeMillis());
        return told;
    }

    private Object ack(Arguments given) throws Exception {
        String receipt = given.text("receipt");
        String[] words = ExtraInfoUtil.split(receipt);
        AckMessageRequestHeader header = new AckMessageRequestHeader();
        header.setTopic(ExtraInfoUtil.getRealTopic(words, given.text("topic"), given.text("group")));
        header.setConsumerGroup(given.text("group"));
        header.setQueueId(ExtraInfoUtil.getQueueId(words));
        header.setOffset(ExtraInfoUtil.getQueueOffset(words));
        header.setExtraInfo(receipt);
        return tell(await(clients.get(given.text("client")).ackMessageAsync(
            given.text("address"), header, CALL_MS), CALL_MS));
    }

    private Object ackSeveral(Arguments given) throws Exception {
        List<String> receipts = new ArrayList<>();
        given.list("receipts").forEach(receipt -> receipts.add((String) receipt));
        return tell(await(clients.get(given.text("client")).batchAckMessageAsync(
            given.text("address"), given.text("topic"), given.text("group"), receipts, CALL_MS),
            CALL_MS));
    }

    private Object change(Arguments given) throws Exception {
        String receipt = given.text("receipt");
        String[] words = ExtraInfoUtil.split(receipt);
        ChangeInvisibleTimeRequestHeader header = new ChangeInvisibleTimeRequestHeader();
        header.setTopic(ExtraInfoUtil.getRealTopic(words, given.text("topic"), given.text("group")));
        header.setConsumerGroup(given.text("group"));
        header.setQueueId(ExtraInfoUtil.getQueueId(words));
        header.setOffset(ExtraInfoUtil.getQueueOffset(words));
        header.setExtraInfo(receipt);
        header.setInvisibleTime(given.number("invisible_ms", 60_000));
        return tell(await(clients.get(given.text("client")).changeInvisibleTimeAsync(
            given.text("address"), given.text("broker"), header, CALL_MS), CALL_MS));
    }

    private static Map<String, Object> tell(AckResult result) {
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("status", result.getStatus().name());
        told.put("pop_ms", result.getPopTime());
        told.put("receipt", result.getExtraInfo());
        return told;
    }

    /** Whether there are messages to pop, within "poll_ms". */
    private Object waitForMessages(Arguments given) throws Exception {
        NotificationRequestHeader header = new NotificationRequestHeader();
        header.setTopic(given.text("topic"));
        header.setConsumerGroup(given.text("group"));
        header.setQueueId(given.integer("queue_id", -1));
        header.setPollTime(given.number("poll_ms", 0));
        header.setBornTime(System.currentTimeMillis());
        header.setOrder(given.flag("order", false));
        long timeout = CALL_MS + header.getPollTime();
        return await(clients.get(given.text("client")).notification(
            given.text("address"), header, timeout), timeout);
    }

    private static <T> T await(CompletableFuture<T> future, long timeout) throws Exception {
        return future.get(timeout + CALL_MS, TimeUnit.MILLISECONDS);
    }
}
