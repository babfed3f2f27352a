package penstock.server;

import static penstock.Golden.bytes;
import static penstock.Golden.hex;
import static penstock.Golden.integer;
import static penstock.Golden.list;
import static penstock.Golden.number;
import static penstock.Golden.object;
import static penstock.Golden.strings;

import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.message.MessageVersion;
import org.apache.rocketmq.store.MessageExtEncoder;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.index.IndexFile;
import penstock.Golden;

/** Golden cases made by classes of the real store. */
public final class StoreGolden implements Golden.StoreCases {
    @Override
    public void fill(Map<String, Object> document) throws Exception {
        for (Object given : list(document.get("store_records"))) {
            record(object(given));
        }
        Path directory = Files.createTempDirectory("penstock-golden");
        IndexFile hasher = new IndexFile(directory.resolve("1").toString(), 1, 2, 0, 0);
        for (Object given : list(document.get("index_hashes"))) {
            object(given).put("hash", hasher.indexKeyHashMethod((String) object(given).get("key")));
        }
        hasher.destroy(0);
        for (Object given : list(document.get("index_files"))) {
            index(object(given), directory.resolve("2"));
        }
        Files.delete(directory);
    }

    /** Encoded as the commit log does it; the physical offset is what the log fills in later: 0. */
    private static void record(Map<String, Object> given) throws Exception {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        Golden.fillMessage(message, given);
        message.setPropertiesString(
            MessageDecoder.messageProperties2String(strings(given.get("properties"))));
        message.setVersion(integer(given.get("record_version")) == 2
            ? MessageVersion.MESSAGE_VERSION_V2 : MessageVersion.MESSAGE_VERSION_V1);
        message.setBodyCRC(UtilAll.crc32(bytes(given.get("body"))));
        MessageStoreConfig config = new MessageStoreConfig();
        config.setMaxMessageSize(64 * 1024);
        MessageExtEncoder encoder = new MessageExtEncoder(config);
        if (encoder.encode(message) != null) {
            throw new IllegalStateException("refused: " + given.get("name"));
        }
        ByteBuffer encoded = encoder.getEncoderBuffer();
        byte[] record = new byte[encoded.getInt(0)];
        encoded.get(0, record);
        given.put("body_crc", message.getBodyCRC());
        given.put("stored_body", given.get("body"));
        given.put("hex", hex(record));
        given.put("msg_id", MessageDecoder.decode(ByteBuffer.wrap(record)).getMsgId());
    }

    private static void index(Map<String, Object> given, Path file) throws Exception {
        IndexFile index = new IndexFile(file.toString(), integer(given.get("hash_slots")),
            integer(given.get("max_entries")), 0, 0);
        for (Object item : list(given.get("puts"))) {
            Map<String, Object> put = object(item);
            put.put("accepted", index.putKey((String) put.get("key"),
                number(put.get("physical_offset")), number(put.get("store_timestamp"))));
        }
        index.flush();
        given.put("hex", hex(Files.readAllBytes(file)));
        index.destroy(0);
    }
}
