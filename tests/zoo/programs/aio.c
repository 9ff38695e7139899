/* Kernel AIO (io_setup, io_submit), as databases use it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
    aio_context_t context = 0;
    struct iocb block, *blocks[] = {&block};
    struct io_event event;
    char data[512], back[512];
    int file;

    setvbuf(stdout, NULL, _IOLBF, 0);
    mkdir("/srv/zoo", 0755);
    file = open("/srv/zoo/aio", O_RDWR | O_CREAT, 0600);
    if (syscall(SYS_io_setup, 32, &context)) {
        perror("wrong: io_setup");
        return 1;
    }
    printf("ready\n");
    for (int n = 1; access("/gate/end", F_OK); n++) {
        memset(data, n, sizeof data);
        memset(&block, 0, sizeof block);
        block.aio_lio_opcode = IOCB_CMD_PWRITE;
        block.aio_fildes = (unsigned)file;
        block.aio_buf = (unsigned long)data;
        block.aio_nbytes = sizeof data;
        if (syscall(SYS_io_submit, context, 1, blocks) != 1 || syscall(SYS_io_getevents, context, 1, 1, &event, NULL) != 1) {
            perror("wrong: io_submit");
            return 1;
        }
        if (event.res != sizeof data || pread(file, back, sizeof back, 0) != sizeof back || memcmp(data, back, sizeof data)) {
            printf("wrong: written %lld\n", (long long)event.res);
            return 1;
        }
        printf("ok %d\n", n);
        usleep(100000);
    }
    return 0;
}
