package penstock.server;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Type;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import penstock.Arguments;
import penstock.Beans;
import penstock.Messages;
import penstock.Session;

/** The admin client behind mqadmin, by name; any of its methods can be called. */
public final class Admins {
    private final Map<String, DefaultMQAdminExt> admins = new HashMap<>();

    public Map<String, Session.Command> commands() {
        Map<String, Session.Command> commands = new HashMap<>();
        commands.put("admin.start", this::start);
        commands.put("admin.stop", this::stop);
        commands.put("admin.call", this::call);
        return commands;
    }

    private Object start(Arguments given) throws Exception {
        String name = given.text("admin");
        DefaultMQAdminExt admin = new DefaultMQAdminExt(given.hook(), 10_000);
        given.configure(admin, name);
        admin.start();
        admins.put(name, admin);
        return null;
    }

    private Object stop(Arguments given) {
        admins.remove(given.text("admin")).shutdown();
        return null;
    }

    /** Calls "method" with "args"; of several with that name, the first that these fit. */
    private Object call(Arguments given) throws Exception {
        List<Object> args = given.list("args");
        for (Method method : DefaultMQAdminExt.class.getMethods()) {
            if (!method.getName().equals(given.text("method"))
                || method.getParameterCount() != args.size()) {
                continue;
            }
            Object[] values = convert(args, method.getGenericParameterTypes());
            if (values != null) {
                try {
                    return tell(method.invoke(admins.get(given.text("admin")), values));
                } catch (InvocationTargetException wrapped) {
                    throw (Exception) wrapped.getCause();
                }
            }
        }
        throw new NoSuchMethodException(given.text("method") + args);
    }

    private static Object[] convert(List<Object> args, Type[] types) {
        Object[] values = new Object[types.length];
        for (int i = 0; i < types.length; i++) {
            try {
                boolean text = types[i] == String.class
                    || types[i] instanceof Class<?> kind && kind.isEnum();
                if (args.get(i) != null && args.get(i) instanceof String != text) {
                    return null;
                }
                values[i] = Beans.convert(args.get(i), types[i]);
            } catch (ReflectiveOperationException | RuntimeException unfit) {
                return null;
            }
        }
        return values;
    }

    private static Object tell(Object result) throws ReflectiveOperationException {
        if (result instanceof MessageExt message) {
            return Messages.line(message);
        }
        if (result instanceof QueryResult found) {
            return tell(found.getMessageList());
        }
        if (result instanceof Collection<?> items) {
            List<Object> told = new ArrayList<>();
            for (Object item : items) {
                told.add(tell(item));
            }
            return told;
        }
        return Beans.dump(result);
    }
}
