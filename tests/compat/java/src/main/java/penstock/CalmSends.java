package penstock;

import com.sun.management.OperatingSystemMXBean;
import java.io.DataInputStream;
import java.io.OutputStream;
import java.lang.management.ManagementFactory;
import java.net.Socket;
import java.util.Arrays;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;

/**
 * Sends one small message at a time, beside the same exchange over a bare socket.
 *
 * <p>Arguments: name servers, broker, topic, sends, body bytes, and a send request in hexadecimal
 * for the bare socket. Blocks of both kinds alternate. Prints one JSON line: of both kinds the
 * median of the blocks' median latencies, the smallest of them and the CPU time of this process per
 * send, in microseconds. The warm-up does not count.
 */
public final class CalmSends {
    private static final int BLOCKS = 20;
    private static final int WARM_BLOCKS = 10;

    private interface Exchange {
        void run() throws Exception;
    }

    private static final class Series {
        private final Exchange exchange;
        private final double[] medians = new double[BLOCKS];
        private int blocks;
        private long cpu;

        private Series(Exchange exchange) {
            this.exchange = exchange;
        }

        private void measure(int count, boolean counts) throws Exception {
            OperatingSystemMXBean system =
                (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
            long[] times = new long[count];
            long before = system.getProcessCpuTime();
            for (int i = 0; i < count; i++) {
                long began = System.nanoTime();
                exchange.run();
                times[i] = System.nanoTime() - began;
            }
            if (counts) {
                cpu += system.getProcessCpuTime() - before;
                Arrays.sort(times);
                medians[blocks++] = times[count / 2] / 1e3;
            }
        }

        private String result(int count) {
            Arrays.sort(medians);
            return String.format(
                "{\"wall_us\":%.2f,\"wall_us_min\":%.2f,\"cpu_us\":%.2f}",
                (medians[BLOCKS / 2 - 1] + medians[BLOCKS / 2]) / 2, medians[0],
                cpu / 1e3 / BLOCKS / count);
        }
    }

    private CalmSends() {
    }

    public static void main(String[] args) throws Exception {
        String topic = args[2];
        int count = Math.max(Integer.parseInt(args[3]) / BLOCKS, 1);
        byte[] body = new byte[Integer.parseInt(args[4])];
        Arrays.fill(body, (byte) 'x');
        byte[] request = bytes(args[5]);
        int colon = args[1].lastIndexOf(':');
        DefaultMQProducer producer = new DefaultMQProducer("penstock-load");
        producer.setNamesrvAddr(args[0]);
        producer.start();
        String host = args[1].substring(0, colon);
        try (Socket socket = new Socket(host, Integer.parseInt(args[1].substring(colon + 1)))) {
            socket.setTcpNoDelay(true);
            OutputStream output = socket.getOutputStream();
            DataInputStream input = new DataInputStream(socket.getInputStream());
            Series client = new Series(() -> producer.send(new Message(topic, body)));
            Series bare = new Series(() -> {
                output.write(request);
                input.readFully(new byte[input.readInt()]);
            });
            for (int i = 0; i < WARM_BLOCKS + BLOCKS; i++) {
                client.measure(count, i >= WARM_BLOCKS);
                bare.measure(count, i >= WARM_BLOCKS);
            }
            System.out.printf(
                "{\"sends\":%d,\"client\":%s,\"bare\":%s}%n", BLOCKS * count,
                client.result(count), bare.result(count));
        }
        System.exit(0);
    }

    private static byte[] bytes(String digits) {
        byte[] result = new byte[digits.length() / 2];
        for (int i = 0; i < result.length; i++) {
            result[i] = (byte) Integer.parseInt(digits.substring(2 * i, 2 * i + 2), 16);
        }
        return result;
    }
}
