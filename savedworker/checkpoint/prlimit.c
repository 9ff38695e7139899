/* Loaded into criu where this machine gives root no CAP_SYS_RESOURCE (a container, a restricted virtual machine).
 *
 * prlimit(2) then refuses to read the limits of another user's process, and CRIU cannot dump it. The same numbers
 * stand in /proc/PID/limits, which root may read.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *const names[] = {
    [RLIMIT_CPU] = "Max cpu time",         [RLIMIT_FSIZE] = "Max file size",       [RLIMIT_DATA] = "Max data size",
    [RLIMIT_STACK] = "Max stack size",     [RLIMIT_CORE] = "Max core file size",   [RLIMIT_RSS] = "Max resident set",
    [RLIMIT_NPROC] = "Max processes",      [RLIMIT_NOFILE] = "Max open files",     [RLIMIT_MEMLOCK] = "Max locked memory",
    [RLIMIT_AS] = "Max address space",     [RLIMIT_LOCKS] = "Max file locks",      [RLIMIT_SIGPENDING] = "Max pending signals",
    [RLIMIT_MSGQUEUE] = "Max msgqueue size", [RLIMIT_NICE] = "Max nice priority",  [RLIMIT_RTPRIO] = "Max realtime priority",
    [RLIMIT_RTTIME] = "Max realtime timeout",
};

static rlim64_t value(const char *word)
{
    return strcmp(word, "unlimited") ? strtoull(word, NULL, 10) : RLIM64_INFINITY;
}

static int from_proc(pid_t pid, unsigned resource, struct rlimit64 *limit)
{
    char path[64], line[256], soft[32], hard[32];
    size_t length;
    int found = 0;
    FILE *file;

    if (resource >= sizeof names / sizeof *names)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/limits", pid);
    file = fopen(path, "re");
    if (!file)
        return 0;
    length = strlen(names[resource]);
    while (!found && fgets(line, sizeof line, file))
        found = !strncmp(line, names[resource], length) && sscanf(line + length, "%31s %31s", soft, hard) == 2;
    fclose(file);
    if (found) {
        limit->rlim_cur = value(soft);
        limit->rlim_max = value(hard);
    }
    return found;
}

/* CRIU calls prlimit through syscall(3), so this is what has to stand before the C library's. */
long syscall(long number, ...)
{
    static long (*next)(long, ...);
    long a[6], result;
    va_list args;

    va_start(args, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(args, long);
    va_end(args);
    if (!next)
        next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == SYS_prlimit64 && result == -1 && errno == EPERM && !a[2] && a[3]) {
        if (from_proc((pid_t)a[0], (unsigned)a[1], (struct rlimit64 *)a[3]))
            return 0;
        errno = EPERM;
    }
    return result;
}
