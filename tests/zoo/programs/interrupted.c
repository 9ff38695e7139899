/* A naive program that takes EINTR for an error. Waits without a limit, or until a fixed time, are never interrupted by a
 * checkpoint; those for a relative time may be, and are counted. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static int quiet[2];

static void *wait_in_poll(void *unused)
{
    struct pollfd one = {quiet[0], POLLIN, 0};
    int result = poll(&one, 1, -1);
    printf("wrong: poll without a limit returned %d, errno %d\n", result, errno);
    exit(1);
    return unused;
}

static void *wait_in_epoll(void *unused)
{
    struct epoll_event event;
    int result = epoll_wait(epoll_create1(0), &event, 1, -1);
    printf("wrong: epoll_wait without a limit returned %d, errno %d\n", result, errno);
    exit(1);
    return unused;
}

static void *wait_for_a_semaphore(void *unused)
{
    struct timespec until;
    sem_t semaphore;

    sem_init(&semaphore, 0, 0);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 100000;
    int result = sem_timedwait(&semaphore, &until);
    printf("wrong: sem_timedwait returned %d, errno %d\n", result, errno);
    exit(1);
    return unused;
}

static void *wait_in_read(void *unused)
{
    char byte;
    long result = read(quiet[0], &byte, 1);
    printf("wrong: read returned %ld, errno %d\n", result, errno);
    exit(1);
    return unused;
}

int main(void)
{
    static void *(*const waits[])(void *) = {wait_in_poll, wait_in_epoll, wait_for_a_semaphore, wait_in_read};
    int epoll = epoll_create1(0), interrupted[3] = {0};
    struct epoll_event event;
    struct timespec little = {0, 200000000};
    pthread_t thread;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (pipe(quiet))
        return 1;
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++)
        pthread_create(&thread, NULL, waits[i], NULL);
    printf("ready\n");
    for (int n = 1; access("/gate/end", F_OK); n++) {
        interrupted[0] += nanosleep(&little, NULL) < 0 && errno == EINTR;
        interrupted[1] += poll(NULL, 0, 200) < 0 && errno == EINTR;
        interrupted[2] += epoll_wait(epoll, &event, 1, 200) < 0 && errno == EINTR;
        printf("interrupted: nanosleep %d poll %d epoll_wait %d\n", interrupted[0], interrupted[1], interrupted[2]);
        printf("ok %d\n", n);
    }
    return 0;
}
