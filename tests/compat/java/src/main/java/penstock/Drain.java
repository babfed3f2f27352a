package penstock;

import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;

/**
 * Consumes a backlog with a push consumer and tells how fast it went.
 *
 * <p>Arguments: name servers, topic, group, messages of warming up, messages. Prints one JSON line:
 * messages, seconds and this process's CPU time, all without what warming up took.
 */
public final class Drain {
    private Drain() {
    }

    public static void main(String[] args) throws Exception {
        long warm = Long.parseLong(args[3]);
        long wanted = warm + Long.parseLong(args[4]);
        AtomicLong seen = new AtomicLong();
        CountDownLatch warmed = new CountDownLatch(1);
        CountDownLatch ended = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[2]);
        consumer.setNamesrvAddr(args[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(args[1], "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = seen.addAndGet(messages.size());
            if (now >= warm) {
                warmed.countDown();
            }
            if (now >= wanted) {
                ended.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        OperatingSystemMXBean system =
            (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        warmed.await();
        long first = seen.get();
        long cpu = system.getProcessCpuTime();
        long began = System.nanoTime();
        ended.await();
        System.out.printf(
            "{\"messages\":%d,\"failed\":0,\"seconds\":%.3f,\"cpu_seconds\":%.3f}%n",
            seen.get() - first, (System.nanoTime() - began) / 1e9,
            (system.getProcessCpuTime() - cpu) / 1e9);
        System.exit(0);
    }
}
