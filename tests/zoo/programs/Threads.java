// Java: compiled code, garbage collection, a thread pool, a scheduled task, direct memory, a file channel and a socket.
import java.io.*;
import java.net.*;
import java.nio.*;
import java.nio.channels.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;

public class Threads {
    static long mix(long seed, int rounds) {
        for (int i = 0; i < rounds; i++) seed = seed * 6364136223846793005L + 1442695040888963407L;
        return seed;
    }

    public static void main(String[] arguments) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(4);
        AtomicLong ticks = new AtomicLong();
        ScheduledExecutorService timer = Executors.newScheduledThreadPool(1);
        timer.scheduleAtFixedRate(ticks::incrementAndGet, 10, 10, TimeUnit.MILLISECONDS);
        ByteBuffer direct = ByteBuffer.allocateDirect(1 << 20);
        Files.createDirectories(Path.of("/srv/zoo"));
        FileChannel file = FileChannel.open(Path.of("/srv/zoo/java"), StandardOpenOption.CREATE, StandardOpenOption.READ, StandardOpenOption.WRITE);
        MappedByteBuffer mapped = file.map(FileChannel.MapMode.READ_WRITE, 0, 1 << 16);
        ServerSocket server = new ServerSocket(0, 5, InetAddress.getLoopbackAddress());
        Socket client = new Socket(server.getInetAddress(), server.getLocalPort());
        Socket accepted = server.accept();
        Map<Integer, byte[]> kept = new ConcurrentHashMap<>();
        System.out.println("ready");
        long garbage = 0;
        for (int n = 1; !new File("/gate/end").exists(); n++) {
            final int step = n;
            long before = ticks.get();
            List<Future<Long>> results = new ArrayList<>();
            for (int i = 0; i < 8; i++) {
                final int part = i;
                results.add(pool.submit(() -> mix(step * 100L + part, 20000)));
            }
            for (int i = 0; i < 8; i++)
                if (results.get(i).get() != mix(n * 100L + i, 20000)) throw new Error("a thread computed something else");
            for (int i = 0; i < 200; i++) garbage += new byte[10000].length;
            byte[] block = new byte[5000];
            Arrays.fill(block, (byte) n);
            kept.put(n, block);
            for (Map.Entry<Integer, byte[]> e : kept.entrySet())
                if (e.getValue()[0] != (byte) (int) e.getKey() || e.getValue()[4999] != (byte) (int) e.getKey()) throw new Error("the heap has changed");
            if (n % 20 == 0) System.gc();
            if (n > 1 && (direct.getInt(0) != n - 1 || mapped.getInt(0) != n - 1)) throw new Error("direct or mapped memory has changed");
            direct.putInt(0, n);
            mapped.putInt(0, n);
            accepted.getOutputStream().write(n & 127);
            if (client.getInputStream().read() != (n & 127)) throw new Error("the socket");
            Thread.sleep(100);
            for (int i = 0; i < 100 && ticks.get() == before; i++) Thread.sleep(100);
            if (ticks.get() == before) throw new Error("the scheduled task stands still");
            System.out.println("ok " + n);
        }
        System.out.println("done");
        System.exit(0);
    }
}
