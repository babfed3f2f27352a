package penstock;

import static penstock.Golden.bytes;
import static penstock.Golden.hex;
import static penstock.Golden.integer;
import static penstock.Golden.list;
import static penstock.Golden.object;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;

/**
 * Reads bytes made by Penstock with the real RocketMQ decoders and tells what they saw. Input and
 * output: see verify in tests/compat/golden.py. A case that Java refuses becomes {"name", "error"};
 * the others are not affected.
 */
public final class Verify {
    private interface Reader {
        Object read(Map<String, Object> given) throws Exception;
    }

    private Verify() {
    }

    static Map<String, Object> read(Map<String, Object> given) {
        Map<String, Object> seen = new LinkedHashMap<>();
        seen.put("frames", each(given.get("frames"), Verify::frame));
        seen.put("records", each(given.get("records"), Verify::records));
        seen.put("batches", each(given.get("batches"), Verify::batch));
        seen.put("properties", each(given.get("properties"),
            one -> MessageDecoder.string2messageProperties((String) one.get("text"))));
        seen.put("compressed", each(given.get("compressed"),
            one -> hex(CompressorFactory.getCompressor(CompressionType.of((String) one.get("codec")))
                .decompress(bytes(one.get("hex"))))));
        seen.put("bodies", each(given.get("bodies"), Verify::body));
        seen.put("register_bodies", each(given.get("register_bodies"), Verify::registerBody));
        return seen;
    }

    private static List<Object> each(Object section, Reader reader) {
        List<Object> results = new ArrayList<>();
        for (Object item : list(section)) {
            Map<String, Object> result = new LinkedHashMap<>();
            result.put("name", object(item).get("name"));
            try {
                result.put("seen", reader.read(object(item)));
            } catch (InvocationTargetException wrapped) {
                result.put("error", String.valueOf(wrapped.getCause()));
            } catch (Exception refused) {
                result.put("error", refused.toString());
            }
            results.add(result);
        }
        return results;
    }

    private static Object frame(Map<String, Object> given) throws Exception {
        byte[] frame = bytes(given.get("hex"));
        ByteBuffer buffer = ByteBuffer.wrap(frame);
        if (buffer.getInt() != frame.length - 4) {
            throw new IllegalArgumentException("length field does not match");
        }
        RemotingCommand command = RemotingCommand.decode(buffer.slice());
        Map<String, Object> seen = new LinkedHashMap<>();
        seen.put("code", command.getCode());
        seen.put("flag", command.getFlag());
        seen.put("opaque", command.getOpaque());
        seen.put("version", command.getVersion());
        seen.put("language", command.getLanguage());
        seen.put("remark", command.getRemark());
        seen.put("ext", command.getExtFields());
        seen.put("body", hex(command.getBody()));
        seen.put("serialize_type", command.getSerializeTypeCurrentRPC());
        return seen;
    }

    /** One or more concatenated records, as in a pull response. */
    private static Object records(Map<String, Object> given) throws Exception {
        List<Object> seen = new ArrayList<>();
        ByteBuffer buffer = ByteBuffer.wrap(bytes(given.get("hex")));
        while (buffer.hasRemaining()) {
            int from = buffer.position();
            MessageExt opened = MessageDecoder.decode(buffer);
            if (opened == null) {
                throw new IllegalArgumentException("no record at byte " + from);
            }
            int size = buffer.position() - from;
            buffer.position(from);
            // 5.x clears the compression flag when it opens a body; ask for the flags as stored.
            MessageExt message = MessageDecoder.decode(buffer, true, false);
            Map<String, Object> one = new LinkedHashMap<>();
            one.put("store_size", size);
            one.put("msg_id", message.getMsgId());
            one.put("topic", message.getTopic());
            one.put("queue_id", message.getQueueId());
            one.put("flag", message.getFlag());
            one.put("queue_offset", message.getQueueOffset());
            one.put("physical_offset", message.getCommitLogOffset());
            one.put("sys_flag", message.getSysFlag());
            one.put("born_timestamp", message.getBornTimestamp());
            one.put("born_host", host(message.getBornHost()));
            one.put("born_port", ((InetSocketAddress) message.getBornHost()).getPort());
            one.put("store_timestamp", message.getStoreTimestamp());
            one.put("store_host", host(message.getStoreHost()));
            one.put("store_port", ((InetSocketAddress) message.getStoreHost()).getPort());
            one.put("reconsume_times", message.getReconsumeTimes());
            one.put("prepared_transaction_offset", message.getPreparedTransactionOffset());
            one.put("body_crc", message.getBodyCRC());
            one.put("stored_body", body(message));
            one.put("body", body(opened));
            one.put("properties", properties(message));
            seen.add(one);
        }
        return seen;
    }

    /** Where nothing is stored Java has null, for the body as for the properties. */
    private static String body(Message message) {
        return message.getBody() == null ? "" : hex(message.getBody());
    }

    private static Map<String, String> properties(Message message) {
        return message.getProperties() == null ? Map.of() : message.getProperties();
    }

    private static String host(Object address) {
        return ((InetSocketAddress) address).getAddress().getHostAddress();
    }

    private static Object batch(Map<String, Object> given) throws Exception {
        List<Object> seen = new ArrayList<>();
        for (Message message : MessageDecoder.decodeMessages(ByteBuffer.wrap(bytes(given.get("hex"))))) {
            Map<String, Object> one = new LinkedHashMap<>();
            one.put("flag", message.getFlag());
            one.put("body", hex(message.getBody()));
            one.put("properties", properties(message));
            seen.add(one);
        }
        return seen;
    }

    private static Object body(Map<String, Object> given) throws Exception {
        Class<?> type = Beans.find((String) given.get("class"));
        if (type == null) {
            throw new ClassNotFoundException((String) given.get("class"));
        }
        return Beans.dump(RemotingSerializable.decode(bytes(given.get("hex")), type));
    }

    private static Object registerBody(Map<String, Object> given) throws Exception {
        boolean compressed = (Boolean) given.get("is_compressed");
        byte[] data = bytes(given.get("hex"));
        for (Method method : Beans.find("RegisterBrokerBody").getMethods()) {
            if (method.getName().equals("decode") && method.getReturnType() != Object.class) {
                // 5.x also wants the broker's version: it tells whether a mapping section follows.
                Object version = MQVersion.value2Version(integer(given.get("version")));
                return Beans.dump(method.getParameterCount() == 3
                    ? method.invoke(null, data, compressed, version)
                    : method.invoke(null, data, compressed));
            }
        }
        throw new NoSuchMethodException("RegisterBrokerBody.decode");
    }
}
