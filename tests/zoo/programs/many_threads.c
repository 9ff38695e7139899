/* 500 threads; each keeps its number in thread-local storage and on its stack, and its thread id, and counts. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define COUNT 500
static _Thread_local long mine;
static volatile long counts[COUNT];

static void *work(void *argument)
{
    volatile long number = (long)argument;
    pid_t id = (pid_t)syscall(SYS_gettid);

    mine = number;
    for (;;) {
        if (mine != number || id != (pid_t)syscall(SYS_gettid)) {
            printf("wrong: thread %ld has become another\n", number);
            exit(1);
        }
        counts[number]++;
        usleep(50000);
    }
    return NULL;
}

int main(void)
{
    long before[COUNT];
    pthread_attr_t small;
    pthread_t thread;

    setvbuf(stdout, NULL, _IOLBF, 0);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    for (long i = 0; i < COUNT; i++)
        if (pthread_create(&thread, &small, work, (void *)i)) {
            printf("wrong: no thread %ld\n", i);
            return 1;
        }
    printf("ready\n");
    for (int n = 1; access("/gate/end", F_OK); n++) {
        for (int i = 0; i < COUNT; i++)
            before[i] = counts[i];
        for (int tries = 0, missing = 1; missing; tries++) {
            missing = 0;
            usleep(100000);
            for (int i = 0; i < COUNT; i++)
                missing += counts[i] == before[i];
            if (missing && tries > 50) {
                printf("wrong: %d threads stand still\n", missing);
                return 1;
            }
        }
        printf("ok %d\n", n);
    }
    return 0;
}
