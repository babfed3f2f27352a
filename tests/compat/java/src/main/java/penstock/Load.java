package penstock;

import java.util.Arrays;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * A load generator: so many threads send small messages synchronously for so many seconds.
 *
 * <p>Arguments: name servers, topic, threads, seconds, body bytes and, if wanted, seconds of warming
 * up before. Prints "warm" when those are over, and at the end one JSON line: how many messages were
 * acknowledged and failed since, and their latency in microseconds.
 */
public final class Load {
    private Load() {
    }

    public static void main(String[] args) throws Exception {
        String topic = args[1];
        int threads = Integer.parseInt(args[2]);
        long seconds = Long.parseLong(args[3]);
        byte[] body = new byte[Integer.parseInt(args[4])];
        long warmSeconds = args.length > 5 ? Long.parseLong(args[5]) : 0;
        Arrays.fill(body, (byte) 'x');
        DefaultMQProducer producer = new DefaultMQProducer("penstock-load");
        producer.setNamesrvAddr(args[0]);
        producer.start();
        producer.send(new Message(topic, body));
        AtomicLong failed = new AtomicLong();
        long begin = System.nanoTime() + warmSeconds * 1_000_000_000L;
        long end = begin + seconds * 1_000_000_000L;
        int kept = 1 << 17;
        long[][] latencies = new long[threads][kept];
        int[] counts = new int[threads];
        Thread[] workers = new Thread[threads];
        for (int i = 0; i < threads; i++) {
            int me = i;
            workers[i] = new Thread(() -> {
                while (System.nanoTime() < end) {
                    long began = System.nanoTime();
                    boolean sent;
                    try {
                        SendStatus status = producer.send(new Message(topic, body)).getSendStatus();
                        sent = status == SendStatus.SEND_OK;
                    } catch (Exception error) {
                        sent = false;
                    }
                    if (began < begin) {
                        continue;
                    }
                    if (!sent) {
                        failed.incrementAndGet();
                        continue;
                    }
                    latencies[me][counts[me]++ % kept] = System.nanoTime() - began;
                }
            });
            workers[i].start();
        }
        if (warmSeconds > 0) {
            Thread.sleep(Math.max((begin - System.nanoTime()) / 1_000_000, 0));
            System.out.println("warm");
        }
        for (Thread worker : workers) {
            worker.join();
        }
        double took = (System.nanoTime() - begin) / 1e9;
        long total = 0;
        for (int count : counts) {
            total += count;
        }
        long[] all = new long[threads * kept];
        int at = 0;
        for (int i = 0; i < threads; i++) {
            int count = Math.min(counts[i], kept);
            System.arraycopy(latencies[i], 0, all, at, count);
            at += count;
        }
        all = Arrays.copyOf(all, at);
        Arrays.sort(all);
        System.out.printf(
            "{\"sent\":%d,\"failed\":%d,\"seconds\":%.3f,\"p50_us\":%d,\"p99_us\":%d,\"p999_us\":%d}%n",
            total, failed.get(), took, all[at / 2] / 1000, all[(int) (at * 0.99)] / 1000,
            all[(int) (at * 0.999)] / 1000);
        producer.shutdown();
        System.exit(0);
    }
}
