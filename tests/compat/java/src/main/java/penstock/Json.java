package penstock;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Plain JSON for our own documents: Map, List, String, Long, Double, Boolean and null.
 * Written here so that the documents do not depend on the JSON library under test, which is
 * not the same one in every RocketMQ release. Output is pure ASCII.
 */
public final class Json {
    private final String text;
    private int at;

    private Json(String text) {
        this.text = text;
    }

    public static Object parse(String text) {
        Json json = new Json(text);
        Object value = json.value();
        json.blanks();
        if (json.at != text.length()) {
            throw json.bad("trailing text");
        }
        return value;
    }

    public static String write(Object value) {
        StringBuilder out = new StringBuilder();
        write(out, value);
        return out.toString();
    }

    private static void write(StringBuilder out, Object value) {
        if (value instanceof Map<?, ?> map) {
            String separator = "{";
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                out.append(separator);
                quote(out, String.valueOf(entry.getKey()));
                out.append(':');
                write(out, entry.getValue());
                separator = ",";
            }
            out.append(map.isEmpty() ? "{}" : "}");
        } else if (value instanceof List<?> list) {
            String separator = "[";
            for (Object item : list) {
                out.append(separator);
                write(out, item);
                separator = ",";
            }
            out.append(list.isEmpty() ? "[]" : "]");
        } else if (value == null || value instanceof Number || value instanceof Boolean) {
            out.append(value);
        } else {
            quote(out, value.toString());
        }
    }

    private static void quote(StringBuilder out, String text) {
        out.append('"');
        for (int i = 0; i < text.length(); i++) {
            char c = text.charAt(i);
            if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < ' ' || c > '~') {
                out.append(String.format("\\u%04x", (int) c));
            } else {
                out.append(c);
            }
        }
        out.append('"');
    }

    private Object value() {
        blanks();
        char c = text.charAt(at);
        if (c == '{') {
            Map<String, Object> map = new LinkedHashMap<>();
            for (at++; !closes('}'); ) {
                String key = (String) value();
                blanks();
                expect(":");
                map.put(key, value());
            }
            return map;
        }
        if (c == '[') {
            List<Object> list = new ArrayList<>();
            for (at++; !closes(']'); ) {
                list.add(value());
            }
            return list;
        }
        if (c == '"') {
            return string();
        }
        if (c == 't') {
            expect("true");
            return true;
        }
        if (c == 'f') {
            expect("false");
            return false;
        }
        if (c == 'n') {
            expect("null");
            return null;
        }
        int from = at;
        while (at < text.length() && "+-0123456789.eE".indexOf(text.charAt(at)) >= 0) {
            at++;
        }
        String number = text.substring(from, at);
        if (number.matches("-?[0-9]+")) {
            return Long.valueOf(number);
        }
        return Double.valueOf(number);
    }

    /** Consumes the closing bracket, or the comma before a further element. */
    private boolean closes(char bracket) {
        blanks();
        if (text.charAt(at) == bracket) {
            at++;
            return true;
        }
        if (text.charAt(at) == ',') {
            at++;
        }
        return false;
    }

    private String string() {
        StringBuilder out = new StringBuilder();
        for (at++; text.charAt(at) != '"'; at++) {
            char c = text.charAt(at);
            if (c == '\\') {
                c = text.charAt(++at);
                if (c == 'u') {
                    c = (char) Integer.parseInt(text.substring(at + 1, at + 5), 16);
                    at += 4;
                } else {
                    int escape = "nrtbf".indexOf(c);
                    c = escape < 0 ? c : "\n\r\t\b\f".charAt(escape);
                }
            }
            out.append(c);
        }
        at++;
        return out.toString();
    }

    private void expect(String token) {
        if (!text.startsWith(token, at)) {
            throw bad("expected " + token);
        }
        at += token.length();
    }

    private void blanks() {
        while (at < text.length() && Character.isWhitespace(text.charAt(at))) {
            at++;
        }
    }

    private IllegalArgumentException bad(String why) {
        return new IllegalArgumentException(why + " at character " + at);
    }
}
