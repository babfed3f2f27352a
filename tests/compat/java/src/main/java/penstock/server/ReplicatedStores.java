package penstock.server;

import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.stream.Stream;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.ha.autoswitch.AutoSwitchHAService;
import org.apache.rocketmq.store.stats.BrokerStatsManager;
import penstock.Arguments;
import penstock.Session;

/**
 * Stores with the HA service of controller mode, whose roles and epochs these commands give instead
 * of a controller. Each command names its "store".
 */
public final class ReplicatedStores {
    private static final int QUEUES = 4;
    private final Map<String, DefaultMessageStore> stores = new HashMap<>();

    public Map<String, Session.Command> commands() {
        return Map.of("store.start", this::start, "store.lead", this::lead, "store.follow",
            this::follow, "store.put", this::put, "store.fill", this::fill, "store.read",
            this::read, "store.state", this::state, "store.stop", this::stop);
    }

    /** Opens the store in "directory" as broker "id", which listens on "ha_port". */
    private Object start(Arguments given) throws Exception {
        Path directory = Path.of(given.text("directory"));
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(directory.toString());
        config.setStorePathCommitLog(directory.resolve("commitlog").toString());
        config.setMappedFileSizeCommitLog(given.integer("segment_bytes", 1 << 20));
        config.setMappedFileSizeConsumeQueue(6_000);
        config.setMaxHashSlotNum(500);
        config.setMaxIndexNum(2_000);
        config.setHaListenPort(given.integer("ha_port", 0));
        config.setHaSendHeartbeatInterval(200);
        config.setTotalReplicas(2);
        config.setInSyncReplicas(given.integer("in_sync_replicas", 1));
        config.setBrokerRole(BrokerRole.SLAVE);
        config.setTimerWheelEnable(false);
        config.setCleanFileForciblyEnable(false);
        BrokerConfig broker = new BrokerConfig();
        broker.setBrokerName("replicated");
        broker.setBrokerId(given.number("id", 1));
        broker.setEnableControllerMode(true);
        DefaultMessageStore store = new DefaultMessageStore(config,
            new BrokerStatsManager("DefaultCluster", true), null, broker,
            new ConcurrentHashMap<>());
        if (!store.load()) {
            throw new IllegalStateException("can't load " + directory);
        }
        store.start();
        AutoSwitchHAService service = (AutoSwitchHAService) store.getHaService();
        service.setLocalBrokerId(given.number("id", 1));
        // As if a controller had agreed to each change of the in-sync set.
        service.registerSyncStateSetChangedListener(service::setSyncStateSet);
        stores.put(given.text("store"), store);
        return null;
    }

    /** Makes the store a master that begins "epoch". */
    private Object lead(Arguments given) throws Exception {
        DefaultMessageStore store = store(given);
        AutoSwitchHAService service = (AutoSwitchHAService) store.getHaService();
        service.setSyncStateSet(Set.of(service.getLocalBrokerId()));
        boolean changed = service.changeToMaster(given.integer("epoch", 1));
        store.getMessageStoreConfig().setBrokerRole(BrokerRole.SYNC_MASTER);
        return changed;
    }

    /** Makes the store a slave of the master at "ha_address", which has "epoch". */
    private Object follow(Arguments given) {
        DefaultMessageStore store = store(given);
        AutoSwitchHAService service = (AutoSwitchHAService) store.getHaService();
        store.getMessageStoreConfig().setBrokerRole(BrokerRole.SLAVE);
        boolean changed = service.changeToSlave(
            given.text("ha_address"), given.integer("epoch", 1), service.getLocalBrokerId());
        service.updateHaMasterAddress(given.text("ha_address"));
        return changed;
    }

    /** Appends "count" messages to the four queues of "topic"; gives the status of each. */
    private Object put(Arguments given) {
        DefaultMessageStore store = store(given);
        List<Object> statuses = new ArrayList<>();
        for (int i = 0; i < given.integer("count", 1); i++) {
            byte[] body = (given.text("text") + i).repeat(50).getBytes(StandardCharsets.UTF_8);
            MessageExtBrokerInner message = message(given.text("topic"), i % QUEUES, body);
            statuses.add(store.putMessage(message).getPutMessageStatus().name());
        }
        return statuses;
    }

    /**
     * Appends random messages of up to 32 KiB to the four queues of "topic" until the log has grown
     * by "bytes"; gives the CRC of each body, by queue. The same "seed" gives the same messages.
     */
    private Object fill(Arguments given) throws Exception {
        DefaultMessageStore store = store(given);
        long end = store.getMaxPhyOffset() + given.number("bytes", 0);
        Random random = new Random(given.number("seed", 1));
        List<List<Object>> bodies = emptyQueues();
        for (int i = 0; store.getMaxPhyOffset() < end; i++) {
            byte[] body = new byte[1 + random.nextInt(32 * 1024)];
            random.nextBytes(body);
            PutMessageStatus status;
            do {
                status = store.putMessage(message(given.text("topic"), i % QUEUES, body))
                    .getPutMessageStatus();
            } while (status == PutMessageStatus.OS_PAGE_CACHE_BUSY);
            if (status != PutMessageStatus.PUT_OK) {
                throw new IllegalStateException(status.name());
            }
            bodies.get(i % QUEUES).add((long) UtilAll.crc32(body));
        }
        return bodies;
    }

    /** Reads the four queues of "topic" from their begin; gives the CRC of each body, by queue. */
    private Object read(Arguments given) throws Exception {
        DefaultMessageStore store = store(given);
        List<List<Object>> bodies = emptyQueues();
        for (int queue = 0; queue < QUEUES; queue++) {
            for (long offset = 0;;) {
                GetMessageResult found =
                    store.getMessage("reader", given.text("topic"), queue, offset, 32, null);
                if (found == null || found.getStatus() != GetMessageStatus.FOUND) {
                    break;
                }
                for (ByteBuffer buffer : found.getMessageBufferList()) {
                    MessageExt message = MessageDecoder.decode(buffer);
                    bodies.get(queue).add((long) UtilAll.crc32(message.getBody()));
                }
                found.release();
                offset = found.getNextBeginOffset();
            }
        }
        return bodies;
    }

    private static List<List<Object>> emptyQueues() {
        return Stream.<List<Object>>generate(ArrayList::new).limit(QUEUES).toList();
    }

    private static MessageExtBrokerInner message(String topic, int queue, byte[] body) {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        message.setTopic(topic);
        message.setQueueId(queue);
        message.setBody(body);
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(new InetSocketAddress("127.0.0.1", 1));
        message.setStoreHost(new InetSocketAddress("127.0.0.1", 2));
        MessageAccessor.setProperties(message, new HashMap<>());
        message.setPropertiesString("");
        return message;
    }

    /** "end" and "confirmed" of the log, its "epochs" (number, begin), and the "in_sync" set. */
    private Object state(Arguments given) {
        DefaultMessageStore store = store(given);
        AutoSwitchHAService service = (AutoSwitchHAService) store.getHaService();
        Map<String, Object> state = new LinkedHashMap<>();
        state.put("end", store.getMaxPhyOffset());
        state.put("confirmed", store.getConfirmOffset());
        List<Object> epochs = new ArrayList<>();
        service.getEpochEntries().forEach(
            entry -> epochs.add(List.of((long) entry.getEpoch(), entry.getStartOffset())));
        state.put("epochs", epochs);
        state.put("in_sync", new ArrayList<Object>(new TreeSet<>(service.getSyncStateSet())));
        return state;
    }

    private Object stop(Arguments given) {
        DefaultMessageStore store = stores.remove(given.text("store"));
        if (store != null) {
            store.shutdown();
        }
        return null;
    }

    private DefaultMessageStore store(Arguments given) {
        return stores.get(given.text("store"));
    }
}
