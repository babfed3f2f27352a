package penstock;

import java.lang.reflect.Array;
import java.lang.reflect.Constructor;
import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.lang.reflect.ParameterizedType;
import java.lang.reflect.Type;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.Comparator;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Builds and dumps RocketMQ's protocol objects field by field, never through a JSON library, so
 * that what the library under test does to them can be told apart. Classes are named without
 * their package because the packages moved between 4.9 and 5.
 *
 * A map whose keys are objects is written as a list of [key, value] pairs, a set as a list (in a
 * dump: sorted by the text of its members).
 */
public final class Beans {
    private static final String[] PACKAGES = {
        "remoting.protocol", "remoting.protocol.body", "remoting.protocol.route",
        "remoting.protocol.heartbeat", "remoting.protocol.admin", "remoting.protocol.subscription",
        "remoting.protocol.header", "remoting.protocol.header.namesrv",
        "remoting.protocol.statictopic", "store.pop", "broker.filter", "namesrv.kvconfig",
        "common", "common.message", "common.protocol", "common.protocol.body",
        "common.protocol.route", "common.protocol.heartbeat", "common.admin",
        "common.subscription", "common.protocol.header", "common.protocol.header.namesrv",
    };

    private Beans() {
    }

    /** The class of that simple name, or null where this release has none. */
    public static Class<?> find(String simpleName) {
        for (String name : PACKAGES) {
            try {
                return Class.forName("org.apache.rocketmq." + name + "." + simpleName);
            } catch (ClassNotFoundException absent) {
                continue;
            }
        }
        return null;
    }

    /** A new object with the given fields set; fields this release does not have are left out. */
    public static Object make(Class<?> type, Map<?, ?> fields) throws ReflectiveOperationException {
        Object bean = blank(type);
        for (Field field : fieldsOf(type)) {
            if (fields.containsKey(nameOf(field))) {
                field.set(bean, convert(fields.get(nameOf(field)), field.getGenericType()));
            }
        }
        return bean;
    }

    /** Every field of an object as plain data, the reverse of {@link #make}. */
    public static Object dump(Object value) throws ReflectiveOperationException {
        if (value == null || value instanceof String || value instanceof Boolean) {
            return value;
        }
        if (value instanceof Number number) {
            boolean real = value instanceof Double || value instanceof Float;
            return real ? (Object) number.doubleValue() : (Object) number.longValue();
        }
        if (value instanceof Enum<?> constant) {
            return constant.name();
        }
        if (value instanceof Collection<?> items) {
            List<Object> list = new ArrayList<>();
            for (Object item : items) {
                list.add(dump(item));
            }
            if (value instanceof Set<?>) {
                list.sort(Comparator.comparing(Json::write));
            }
            return list;
        }
        if (value instanceof long[] numbers) {
            return dump(Arrays.stream(numbers).boxed().toList());
        }
        if (value instanceof int[] numbers) {
            return dump(Arrays.stream(numbers).boxed().toList());
        }
        if (value instanceof Map<?, ?> map) {
            boolean plain = map.keySet().stream()
                .allMatch(key -> key instanceof String || key instanceof Number);
            Map<String, Object> object = new LinkedHashMap<>();
            List<Object> pairs = new ArrayList<>();
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                Object item = dump(entry.getValue());
                object.put(String.valueOf(entry.getKey()), item);
                pairs.add(pair(dump(entry.getKey()), item));
            }
            return plain ? object : pairs;
        }
        if (!value.getClass().getName().startsWith("org.apache.rocketmq.")) {
            return value.toString();
        }
        Map<String, Object> object = new LinkedHashMap<>();
        for (Field field : fieldsOf(value.getClass())) {
            if (field.getType() != java.util.Random.class) {
                object.put(nameOf(field), dump(field.get(value)));
            }
        }
        return object;
    }

    /** Through the constructor with the fewest arguments, all of them zero or null. */
    private static Object blank(Class<?> type) throws ReflectiveOperationException {
        Constructor<?> constructor = Arrays.stream(type.getDeclaredConstructors())
            .min(Comparator.comparingInt(Constructor::getParameterCount)).orElseThrow();
        constructor.setAccessible(true);
        Object[] zeros = Arrays.stream(constructor.getParameterTypes())
            .map(c -> Array.get(Array.newInstance(c, 1), 0)).toArray();
        return constructor.newInstance(zeros);
    }

    private static List<Object> pair(Object key, Object value) {
        List<Object> pair = new ArrayList<>();
        pair.add(key);
        pair.add(value);
        return pair;
    }

    private static List<Field> fieldsOf(Class<?> type) {
        List<Field> fields = new ArrayList<>();
        for (Class<?> c = type; c != Object.class; c = c.getSuperclass()) {
            for (Field field : c.getDeclaredFields()) {
                if (!Modifier.isStatic(field.getModifiers()) && !field.isSynthetic()) {
                    field.setAccessible(true);
                    fields.add(field);
                }
            }
        }
        return fields;
    }

    /** Field names as on the wire: a boolean field isX has the accessors of a property x. */
    private static String nameOf(Field field) {
        String name = field.getName();
        if (field.getType() == boolean.class && name.matches("is[A-Z].*")) {
            return Character.toLowerCase(name.charAt(2)) + name.substring(3);
        }
        return name;
    }

    @SuppressWarnings({"unchecked", "rawtypes"})
    public static Object convert(Object value, Type type) throws ReflectiveOperationException {
        if (value == null) {
            return null;
        }
        Class<?> raw = (Class<?>) (type instanceof ParameterizedType p ? p.getRawType() : type);
        Type[] args = type instanceof ParameterizedType p ? p.getActualTypeArguments() : null;
        if (raw == String.class || raw == Object.class || raw == boolean.class || raw == Boolean.class) {
            return raw == boolean.class || raw == Boolean.class
                ? Boolean.valueOf(value.toString()) : value;
        }
        if (raw == int.class || raw == Integer.class) {
            return Integer.valueOf(value.toString());
        }
        if (raw == long.class || raw == Long.class) {
            return Long.valueOf(value.toString());
        }
        if (raw == double.class || raw == Double.class) {
            return Double.valueOf(value.toString());
        }
        if (raw == AtomicLong.class) {
            return new AtomicLong(Long.parseLong(value.toString()));
        }
        if (raw.isEnum()) {
            return Enum.valueOf((Class<Enum>) raw, (String) value);
        }
        if (raw == Properties.class) {
            Properties properties = new Properties();
            properties.putAll((Map<?, ?>) value);
            return properties;
        }
        if (Collection.class.isAssignableFrom(raw)) {
            Collection items = raw == List.class ? new ArrayList<>()
                : raw == Set.class ? new LinkedHashSet<>()
                : (Collection) raw.getDeclaredConstructor().newInstance();
            for (Object item : (List<?>) value) {
                items.add(convert(item, args[0]));
            }
            return items;
        }
        if (Map.class.isAssignableFrom(raw)) {
            Map map = raw == ConcurrentMap.class ? new ConcurrentHashMap<>()
                : raw == Map.class ? new HashMap<>()
                : (Map) raw.getDeclaredConstructor().newInstance();
            Collection<?> entries = value instanceof Map<?, ?> object
                ? object.entrySet().stream().map(e -> pair(e.getKey(), e.getValue())).toList()
                : (List<?>) value;
            for (Object entry : entries) {
                List<?> pair = (List<?>) entry;
                map.put(convert(pair.get(0), args[0]), convert(pair.get(1), args[1]));
            }
            return map;
        }
        return make(raw, (Map<?, ?>) value);
    }
}
