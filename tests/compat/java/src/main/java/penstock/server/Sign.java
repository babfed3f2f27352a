package penstock.server;

import java.io.PrintStream;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import penstock.Json;
import penstock.Program;

/**
 * Signs requests as the clients' hook does. Standard input: a JSON array of objects with "access",
 * "secret", "token" (or null), "ext" and "body" (base64); prints for each the fields it then has.
 */
public final class Sign {
    private Sign() {
    }

    public static void main(String[] args) {
        Program.run(Sign::run);
    }

    private static void run(PrintStream out) throws Exception {
        String input = new String(System.in.readAllBytes(), "UTF-8");
        for (Object item : (List<?>) Json.parse(input)) {
            Map<?, ?> wanted = (Map<?, ?>) item;
            RemotingCommand request = RemotingCommand.createRequestCommand(10, null);
            HashMap<String, String> ext = new HashMap<>();
            ((Map<?, ?>) wanted.get("ext")).forEach((k, v) -> ext.put((String) k, (String) v));
            request.setExtFields(ext);
            request.setBody(Base64.getDecoder().decode((String) wanted.get("body")));
            String access = (String) wanted.get("access");
            String secret = (String) wanted.get("secret");
            String token = (String) wanted.get("token");
            SessionCredentials credentials = new SessionCredentials(access, secret);
            credentials.setSecurityToken(token);
            new AclClientRPCHook(credentials).doBeforeRequest("127.0.0.1:1", request);
            out.println(Json.write(new LinkedHashMap<>(request.getExtFields())));
        }
    }
}
