package penstock;

import java.util.List;
import java.util.Map;
import java.util.Objects;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.remoting.RPCHook;

/** What came with a command, by name and type. */
public final class Arguments {
    private final Map<String, Object> given;

    public Arguments(Map<String, Object> given) {
        this.given = given;
    }

    public boolean has(String name) {
        return given.get(name) != null;
    }

    public String text(String name) {
        return (String) Objects.requireNonNull(given.get(name), name);
    }

    public String text(String name, String otherwise) {
        return has(name) ? text(name) : otherwise;
    }

    public long number(String name, long otherwise) {
        return has(name) ? (Long) given.get(name) : otherwise;
    }

    public int integer(String name, int otherwise) {
        return Math.toIntExact(number(name, otherwise));
    }

    public boolean flag(String name, boolean otherwise) {
        return has(name) ? (Boolean) given.get(name) : otherwise;
    }

    public List<Object> list(String name) {
        return has(name) ? Golden.list(given.get(name)) : List.of();
    }

    public Map<String, Object> map(String name) {
        return has(name) ? Golden.object(given.get(name)) : Map.of();
    }

    /** The signing hook for "user" and "password", or null: requests go unsigned. */
    public RPCHook hook() {
        return has("user")
            ? new AclClientRPCHook(new SessionCredentials(text("user"), text("password")))
            : null;
    }

    /** Sets what all kinds of client share. Every client has a connection and an id of its own. */
    public void configure(ClientConfig client, String name) {
        client.setNamesrvAddr(text("namesrv"));
        client.setInstanceName(name + "-" + ProcessHandle.current().pid());
        client.setUseTLS(flag("tls", false));
        client.setPollNameServerInterval(integer("poll_namesrv_ms", 5_000));
        // A client's heartbeats can hinder each other, and pulls then fail until the next one.
        client.setHeartbeatBrokerInterval(3_000);
        client.setPersistConsumerOffsetInterval(integer("persist_ms", 1_000));
    }
}
