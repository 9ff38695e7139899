/* A system-call filter of the program's own on top of ours; a child that inherits it; robust futexes. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_sethostname, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 77),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    pthread_mutex_t *lock = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t robust;
    int status, told[2];
    pid_t child;
    char byte;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        printf("wrong: no filter: %d\n", errno);
        return 1;
    }
    pthread_mutexattr_init(&robust);
    pthread_mutexattr_setpshared(&robust, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(lock, &robust);
    if (pipe(told))
        return 1;
    child = fork();
    if (child == 0) {
        pthread_mutex_lock(lock);
        if (write(told[1], "x", 1) != 1)
            _exit(1);
        while (access("/gate/end", F_OK))
            usleep(20000);
        _exit(0); /* with the lock held: its next owner is told */
    }
    if (read(told[0], &byte, 1) != 1)
        return 1;
    printf("ready\n");
    for (int n = 1; access("/gate/end", F_OK); n++) {
        if (syscall(__NR_sethostname, "x", 1) != -1 || errno != 77) {
            printf("wrong: the program's own filter is gone: errno %d\n", errno);
            return 1;
        }
        if (pthread_mutex_trylock(lock) != EBUSY) {
            printf("wrong: the lock of another process is free\n");
            return 1;
        }
        printf("ok %d\n", n);
        usleep(100000);
    }
    waitpid(child, &status, 0);
    status = pthread_mutex_lock(lock);
    if (status != EOWNERDEAD) {
        printf("wrong: the death of a lock's owner is not told: %d\n", status);
        return 1;
    }
    return 0;
}
