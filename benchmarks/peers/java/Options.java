import java.util.HashMap;
import java.util.Map;

/** What a load program was asked to do: its address, topic and kind of load, then name=value pairs. */
final class Options {
    final String address;
    final String topic;
    final String kind;
    private final Map<String, String> given = new HashMap<>();

    Options(String[] args) {
        address = args[0];
        topic = args[1];
        kind = args[2];
        for (int i = 3; i < args.length; i++) {
            String[] pair = args[i].split("=", 2);
            given.put(pair[0], pair[1]);
        }
    }

    String text(String name) {
        String value = given.get(name);
        if (value == null) {
            throw new IllegalArgumentException(kind + " needs " + name);
        }
        return value;
    }

    int number(String name) {
        return Integer.parseInt(text(name));
    }

    double seconds(String name) {
        return Double.parseDouble(text(name));
    }
}
