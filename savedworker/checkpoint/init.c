/* The worker's pid 1: starts the command, reaps orphans, and tells how the command ended.
 *
 * usage: init STATUS_FILE COMMAND [ARG ...]
 *
 * The command's raw wait status is written to STATUS_FILE as "exit N" or "signal N", because an exit code of 128+N
 * alone cannot tell a signal from a program that returned that number. The file must exist and be writable. Signals
 * that can be caught are passed on to the command, as a terminal would to its foreground process.
 *
 * Stdout is a pipe that the shim holds. A broken one means that the shim is dead, and with it whoever would freeze this worker
 * at the end of its lease: then init ends, and all other processes of the namespace with it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile pid_t child;

static void forward(int sig)
{
    int saved = errno;
    if (child > 0)
        kill(child, sig);
    errno = saved;
}

static void wake(int sig)
{
    (void)sig; /* ends ppoll */
}

static void report(int fd, const char *what, int number)
{
    char line[32];
    int n = snprintf(line, sizeof line, "%s %d\n", what, number);
    if (pwrite(fd, line, (size_t)n, 0) != n)
        _exit(125);
}

int main(int argc, char **argv)
{
    static const int passed[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT};
    struct sigaction woken = {.sa_handler = wake};
    struct pollfd shim = {.fd = STDOUT_FILENO};
    sigset_t all, before, blocked;
    int fd, status, result = 125;
    pid_t pid;

    if (argc < 3) {
        fprintf(stderr, "usage: init STATUS_FILE COMMAND [ARG ...]\n");
        return 125;
    }
    fd = open(argv[1], O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        fprintf(stderr, "savedworker init: %s: %s\n", argv[1], strerror(errno));
        return 125;
    }
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    child = fork();
    if (child < 0) {
        fprintf(stderr, "savedworker init: fork: %s\n", strerror(errno));
        return 125;
    }
    if (child == 0) {
        setsid();
        sigprocmask(SIG_SETMASK, &before, NULL);
        execvp(argv[2], argv + 2);
        int why = errno;
        fprintf(stderr, "savedworker: cannot run %s: %s\n", argv[2], strerror(why));
        _exit(why == ENOENT || why == ENOTDIR ? 127 : 126);
    }
    for (size_t i = 0; i < sizeof passed / sizeof *passed; i++) {
        struct sigaction action = {.sa_handler = forward, .sa_flags = SA_RESTART};
        sigaction(passed[i], &action, NULL);
    }
    sigaction(SIGCHLD, &woken, NULL);
    sigdelset(&before, SIGCHLD);
    blocked = before;
    sigaddset(&blocked, SIGCHLD); /* comes in ppoll only, so that none is missed */
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    for (;;) {
        pid = waitpid(-1, &status, WNOHANG);
        if (pid < 0)
            break; /* ECHILD: the command was reaped below */
        if (pid == 0) {
            if (ppoll(&shim, 1, NULL, &before) > 0) {
                if (shim.revents & POLLERR)
                    break;
                shim.fd = -1; /* no stdout at all: poll ignores it */
            }
            continue;
        }
        if (pid != child)
            continue;
        if (WIFEXITED(status)) {
            result = WEXITSTATUS(status);
            report(fd, "exit", result);
        } else {
            result = 128 + WTERMSIG(status);
            report(fd, "signal", WTERMSIG(status));
        }
        break;
    }
    return result; /* the end of pid 1 ends every other process of the namespace */
}
