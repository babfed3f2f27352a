package penstock.server;

import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import penstock.Arguments;
import penstock.Golden;
import penstock.Session;

/** The admin tool, and the hook that signs requests. */
public final class Tools {
    /** Gives the tool's own class away, whose commands are protected. */
    private static final class Tool extends MQAdminStartup {
        private static void run(String[] words) {
            // Some commands keep the connection of their first use, which is closed at its end.
            SUB_COMMANDS.clear();
            MQAdminStartup.main(words);
        }
    }

    public Map<String, Session.Command> commands() {
        return Map.of("mqadmin", this::mqadmin, "sign", this::sign);
    }

    /** Runs the tool with "words" and gives what it printed; a failed command prints nothing. */
    private Object mqadmin(Arguments given) {
        PrintStream before = System.out;
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        System.setOut(new PrintStream(printed, true, StandardCharsets.UTF_8));
        try {
            Tool.run(given.list("words").toArray(new String[0]));
        } finally {
            System.setOut(before);
        }
        return printed.toString(StandardCharsets.UTF_8);
    }

    /**
     * Signs each of "requests" ("access", "secret", "token" or null, "ext" and "body" in base64) as
     * the clients' hook does; gives the fields that each then has.
     */
    private Object sign(Arguments given) throws Exception {
        List<Object> signed = new ArrayList<>();
        for (Object one : given.list("requests")) {
            Arguments wanted = new Arguments(Golden.object(one));
            RemotingCommand request = RemotingCommand.createRequestCommand(10, null);
            HashMap<String, String> ext = new HashMap<>();
            wanted.map("ext").forEach((name, value) -> ext.put(name, (String) value));
            request.setExtFields(ext);
            request.setBody(Base64.getDecoder().decode(wanted.text("body")));
            SessionCredentials credentials =
                new SessionCredentials(wanted.text("access"), wanted.text("secret"));
            credentials.setSecurityToken(wanted.text("token", null));
            new AclClientRPCHook(credentials).doBeforeRequest("127.0.0.1:1", request);
            signed.add(request.getExtFields());
        }
        return signed;
    }
}
