package penstock;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import java.lang.reflect.Method;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageId;
import org.apache.rocketmq.remoting.CommandCustomHeader;
import org.apache.rocketmq.remoting.protocol.LanguageCode;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.remoting.protocol.SerializeType;

/**
 * Adds to the inputs of each case what the real RocketMQ classes make of it. Inputs:
 * tests/compat/golden_inputs.py; structure of the result: tests/compat/golden.py.
 */
public final class Golden {
    /** Cases that need classes of the store; present only where the servers were published. */
    public interface StoreCases {
        void fill(Map<String, Object> document) throws Exception;
    }

    private interface Maker {
        void fill(Map<String, Object> given) throws Exception;
    }

    private Golden() {
    }

    static Map<String, Object> make(Map<String, Object> inputs) throws Exception {
        Map<String, Object> document = new LinkedHashMap<>();
        document.put("version_number", MQVersion.CURRENT_VERSION);
        document.putAll(inputs);
        each(document, "frames", Golden::frame);
        each(document, "records", Golden::record);
        each(document, "properties_to_text", given -> given.put("text",
            MessageDecoder.messageProperties2String(strings(given.get("properties")))));
        each(document, "text_to_properties", given -> given.put("properties",
            MessageDecoder.string2messageProperties((String) given.get("text"))));
        each(document, "batches", Golden::batch);
        each(document, "offset_ids", Golden::offsetId);
        document.put("unique_ids", uniqueIds());
        each(document, "unique_id_reads", given -> {
            given.put("ip", MessageClientIDSetter.getIPStrFromID((String) given.get("id")));
            given.put("pid", MessageClientIDSetter.getPidFromID((String) given.get("id")));
        });
        each(document, "string_hashes", given -> given.put("hash", given.get("text").hashCode()));
        each(document, "crcs", given -> given.put("crc32", UtilAll.crc32(bytes(given.get("body")))));
        each(document, "compressed", given -> given.put("hex", hex(CompressorFactory
            .getCompressor(CompressionType.of((String) given.get("codec")))
            .compress(bytes(given.get("body")), integer(given.get("level"))))));
        each(document, "bodies", Golden::body);
        list(document.get("bodies")).removeIf(given -> !object(given).containsKey("text"));
        try {
            Class<?> store = Class.forName("penstock.server.StoreGolden");
            ((StoreCases) store.getDeclaredConstructor().newInstance()).fill(document);
        } catch (ClassNotFoundException clientOnly) {
            document.put("store_records", new ArrayList<>());
            document.put("index_hashes", new ArrayList<>());
            document.put("index_files", new ArrayList<>());
        }
        return document;
    }

    private static void each(Map<String, Object> document, String section, Maker maker)
            throws Exception {
        for (Object given : list(document.get(section))) {
            maker.fill(object(given));
        }
    }

    private static void frame(Map<String, Object> given) throws Exception {
        for (SerializeType type : SerializeType.values()) {
            // As NettyEncoder does it: the header through fastEncodeHeader, then the body.
            RemotingCommand command = command(given);
            command.setSerializeTypeCurrentRPC(type);
            ByteBuf buffer = Unpooled.buffer();
            command.fastEncodeHeader(buffer);
            if (command.getBody() != null) {
                buffer.writeBytes(command.getBody());
            }
            byte[] frame = new byte[buffer.readableBytes()];
            buffer.readBytes(frame);
            given.put(type.name().toLowerCase(), hex(frame));
            // What the receiver is to see; binary frames cannot carry empty strings.
            RemotingCommand seen =
                RemotingCommand.decode(ByteBuffer.wrap(frame, 4, frame.length - 4).slice());
            given.put(type.name().toLowerCase() + "_ext", seen.getExtFields());
        }
    }

    private static RemotingCommand command(Map<String, Object> given) throws Exception {
        CommandCustomHeader header = null;
        if (given.get("header_class") != null) {
            Class<?> type = Beans.find((String) given.get("header_class"));
            header = (CommandCustomHeader) Beans.make(type, object(given.get("header")));
        }
        RemotingCommand command =
            RemotingCommand.createRequestCommand(integer(given.get("code")), header);
        command.setFlag(integer(given.get("flag")));
        command.setOpaque(integer(given.get("opaque")));
        command.setVersion(integer(given.get("version")));
        command.setLanguage(LanguageCode.valueOf((String) given.get("language")));
        command.setRemark((String) given.get("remark"));
        if (given.get("ext") != null) {
            command.setExtFields(new HashMap<>(strings(given.get("ext"))));
        }
        if (given.get("body") != null) {
            command.setBody(bytes(given.get("body")));
        }
        return command;
    }

    private static void record(Map<String, Object> given) throws Exception {
        MessageExt message = new MessageExt();
        fillMessage(message, given);
        // The CRC is over the body as stored, which encode itself compresses: encode, look, redo.
        byte[] first = MessageDecoder.encode(message, true);
        byte[] stored = MessageDecoder.decode(ByteBuffer.wrap(first), true, false).getBody();
        message.setBodyCRC(UtilAll.crc32(stored));
        given.put("body_crc", message.getBodyCRC());
        given.put("stored_body", hex(stored));
        byte[] record = MessageDecoder.encode(message, true);
        given.put("hex", hex(record));
        given.put("msg_id", MessageDecoder.decode(ByteBuffer.wrap(record)).getMsgId());
    }

    /** Sets every input field of a record case. */
    public static void fillMessage(MessageExt message, Map<String, Object> given) throws Exception {
        message.setTopic((String) given.get("topic"));
        message.setQueueId(integer(given.get("queue_id")));
        message.setFlag(integer(given.get("flag")));
        message.setQueueOffset(number(given.get("queue_offset")));
        message.setCommitLogOffset(number(given.get("physical_offset")));
        message.setSysFlag(integer(given.get("sys_flag")));
        message.setBornTimestamp(number(given.get("born_timestamp")));
        message.setBornHost(address(given.get("born_host"), given.get("born_port")));
        message.setStoreTimestamp(number(given.get("store_timestamp")));
        message.setStoreHost(address(given.get("store_host"), given.get("store_port")));
        message.setReconsumeTimes(integer(given.get("reconsume_times")));
        message.setPreparedTransactionOffset(number(given.get("prepared_transaction_offset")));
        message.setBody(bytes(given.get("body")));
        MessageAccessor.setProperties(message, strings(given.get("properties")));
    }

    private static void batch(Map<String, Object> given) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (Object item : list(given.get("messages"))) {
            Map<String, Object> one = object(item);
            Message message = new Message("T", bytes(one.get("body")));
            message.setFlag(integer(one.get("flag")));
            MessageAccessor.setProperties(message, strings(one.get("properties")));
            messages.add(message);
        }
        given.put("hex", hex(MessageDecoder.encodeMessages(messages)));
    }

    private static void offsetId(Map<String, Object> given) throws Exception {
        InetSocketAddress host = address(given.get("host"), given.get("port"));
        int size = host.getAddress().getAddress().length + 4;
        ByteBuffer addr = ByteBuffer.allocate(size).put(host.getAddress().getAddress());
        addr.putInt(host.getPort()).flip();
        String id = MessageDecoder.createMessageId(
            ByteBuffer.allocate(size + 8), addr, number(given.get("offset")));
        given.put("id", id);
        MessageId decoded = MessageDecoder.decodeMessageId(id);
        InetSocketAddress back = (InetSocketAddress) decoded.getAddress();
        if (!back.equals(host) || decoded.getOffset() != number(given.get("offset"))) {
            throw new IllegalStateException("Java does not read back its own id " + id);
        }
    }

    private static List<Object> uniqueIds() {
        List<Object> samples = new ArrayList<>();
        for (int i = 0; i < 3; i++) {
            Map<String, Object> sample = new LinkedHashMap<>();
            sample.put("created_ms", System.currentTimeMillis());
            String id = MessageClientIDSetter.createUniqID();
            sample.put("id", id);
            sample.put("ip", MessageClientIDSetter.getIPStrFromID(id));
            sample.put("pid", MessageClientIDSetter.getPidFromID(id));
            // Read in the very millisecond it was made in, an id passes for one of last month.
            while (System.currentTimeMillis() <= (Long) sample.get("created_ms") + 20) {
                Thread.onSpinWait();
            }
            sample.put("near_time_ms", MessageClientIDSetter.getNearlyTimeFromID(id).getTime());
            samples.add(sample);
        }
        return samples;
    }

    /** Leaves a case whose class this release lacks without "text"; main drops those. */
    private static void body(Map<String, Object> given) throws Exception {
        Class<?> type = Beans.find((String) given.get("class"));
        if (type == null) {
            return;
        }
        Object bean = Beans.make(type, object(given.get("fields")));
        given.put("object", Beans.dump(bean));
        given.put("text", new String(RemotingSerializable.encode(bean), StandardCharsets.UTF_8));
        given.put("pretty", RemotingSerializable.toJson(bean, true));
        if (Boolean.TRUE.equals(given.get("strict"))) {
            given.put("strict_text", new String(strict(bean), StandardCharsets.UTF_8));
        }
        if (Boolean.TRUE.equals(given.get("compress"))) {
            Method encode = type.getMethod("encode", boolean.class);
            given.put("compressed", hex((byte[]) encode.invoke(bean, true)));
        }
    }

    /** With the features the name server asks for when the client wants standard JSON. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    private static byte[] strict(Object bean) throws ReflectiveOperationException {
        List<String> wanted = List.of(
            "BrowserCompatible", "QuoteFieldNames", "SkipTransientField", "MapSortField");
        for (Method method : RemotingSerializable.class.getMethods()) {
            if (!method.isVarArgs() || !method.getName().equals("encode")) {
                continue;
            }
            Class<?> feature = method.getParameterTypes()[0].getComponentType();
            List<Object> features = new ArrayList<>();
            for (Object constant : feature.getEnumConstants()) {
                if (wanted.contains(((Enum) constant).name())) {
                    features.add(constant);
                }
            }
            Object array = features.toArray((Object[]) java.lang.reflect.Array.newInstance(feature, 0));
            return (byte[]) method.invoke(bean, array);
        }
        throw new NoSuchMethodException("encode with features");
    }

    // Accessors of parsed JSON, shared by the programs of this package.

    @SuppressWarnings("unchecked")
    public static Map<String, Object> object(Object value) {
        return (Map<String, Object>) value;
    }

    @SuppressWarnings("unchecked")
    public static Map<String, String> strings(Object value) {
        return (Map<String, String>) value;
    }

    @SuppressWarnings("unchecked")
    public static List<Object> list(Object value) {
        return value == null ? new ArrayList<>() : (List<Object>) value;
    }

    public static int integer(Object value) {
        return ((Number) value).intValue();
    }

    public static long number(Object value) {
        return ((Number) value).longValue();
    }

    public static byte[] bytes(Object hex) {
        return HexFormat.of().parseHex((String) hex);
    }

    public static String hex(byte[] bytes) {
        return bytes == null ? null : HexFormat.of().formatHex(bytes);
    }

    private static InetSocketAddress address(Object host, Object port) throws Exception {
        return new InetSocketAddress(InetAddress.getByName((String) host), integer(port));
    }
}
