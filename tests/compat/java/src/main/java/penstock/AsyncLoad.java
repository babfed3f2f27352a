package penstock;

import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.Arrays;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/**
 * A load generator: sends small messages asynchronously, so many in flight at a time.
 *
 * <p>Arguments: name servers, topic, messages in flight, seconds of warming up, seconds, body
 * bytes. Prints one JSON line: acknowledged and failed messages, and this process's CPU time, all
 * without what warming up took.
 */
public final class AsyncLoad {
    private static final AtomicLong SENT = new AtomicLong();
    private static final AtomicLong FAILED = new AtomicLong();

    private AsyncLoad() {
    }

    public static void main(String[] args) throws Exception {
        String topic = args[1];
        Semaphore room = new Semaphore(Integer.parseInt(args[2]));
        byte[] body = new byte[Integer.parseInt(args[5])];
        Arrays.fill(body, (byte) 'x');
        DefaultMQProducer producer = new DefaultMQProducer("penstock-load");
        producer.setNamesrvAddr(args[0]);
        producer.start();
        producer.send(new Message(topic, body));
        SendCallback done = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                SENT.incrementAndGet();
                room.release();
            }

            @Override
            public void onException(Throwable error) {
                FAILED.incrementAndGet();
                room.release();
            }
        };
        sendFor(Long.parseLong(args[3]), producer, topic, body, room, done);
        OperatingSystemMXBean system =
            (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        long sent = SENT.get();
        long failed = FAILED.get();
        long cpu = system.getProcessCpuTime();
        long began = System.nanoTime();
        sendFor(Long.parseLong(args[4]), producer, topic, body, room, done);
        System.out.printf(
            "{\"messages\":%d,\"failed\":%d,\"seconds\":%.3f,\"cpu_seconds\":%.3f}%n",
            SENT.get() - sent, FAILED.get() - failed, (System.nanoTime() - began) / 1e9,
            (system.getProcessCpuTime() - cpu) / 1e9);
        System.exit(0);
    }

    private static void sendFor(
        long seconds, DefaultMQProducer producer, String topic, byte[] body, Semaphore room,
        SendCallback done) throws Exception {
        long end = System.nanoTime() + seconds * 1_000_000_000L;
        while (System.nanoTime() < end) {
            room.acquire();
            producer.send(new Message(topic, body), done);
        }
    }
}
