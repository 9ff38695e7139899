/* Loaded into criu: calls that wait without a limit, or until a fixed time, go on waiting after a dump.
 *
 * Freezing a process makes them return ERESTART_RESTARTBLOCK, which only the kernel that interrupted them can resume; CRIU
 * (4.2.1, compel/arch/x86/src/lib/infect.c) turns that into EINTR, in the process that runs on as well as in the image.
 * Programs that take EINTR for an error end then: script(1) of util-linux does, with every checkpoint. Where the call can be
 * made again with the very same arguments, it is told to be. Not where a relative time would begin anew: a long sleep would
 * never end under periodic checkpoints.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>

#define ERESTARTNOHAND 514
#define ERESTART_RESTARTBLOCK 516

#ifdef __x86_64__
/* Whether a signal is about to be handled: then the call was interrupted for it. */
static int signalled(pid_t thread)
{
    char path[64], line[256];
    unsigned long long pending = 0, shared = 0, blocked = 0;
    FILE *file;

    snprintf(path, sizeof path, "/proc/%d/status", thread);
    file = fopen(path, "re");
    if (!file)
        return 1;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "SigPnd: %llx", &pending);
        sscanf(line, "ShdPnd: %llx", &shared);
        sscanf(line, "SigBlk: %llx", &blocked);
    }
    fclose(file);
    return ((pending | shared) & ~blocked) != 0;
}

static int can_be_made_again(pid_t thread, const struct user_regs_struct *regs)
{
    int command = (int)regs->rsi & FUTEX_CMD_MASK;

    if ((long)regs->rax == -ERESTART_RESTARTBLOCK)
        return (regs->orig_rax == SYS_poll && (int)regs->rdx < 0) ||
               (regs->orig_rax == SYS_futex && (command == FUTEX_WAIT_BITSET || !regs->r10));
    if ((long)regs->rax == -EINTR)
        return ((regs->orig_rax == SYS_epoll_wait || regs->orig_rax == SYS_epoll_pwait) && (int)regs->r10 < 0) &&
               !signalled(thread);
    return 0;
}

long ptrace(enum __ptrace_request request, ...)
{
    static long (*next)(int, ...);
    va_list args;
    pid_t thread;
    void *address, *data;
    long result;

    va_start(args, request);
    thread = va_arg(args, pid_t);
    address = va_arg(args, void *);
    data = va_arg(args, void *);
    va_end(args);
    if (!next)
        next = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
    result = next(request, thread, address, data);
    if (!result && request == PTRACE_GETREGSET && (long)address == NT_PRSTATUS) {
        const struct iovec *where = data;
        struct user_regs_struct *regs = where->iov_base;

        if (where->iov_len >= sizeof *regs && (long)regs->orig_rax >= 0 && can_be_made_again(thread, regs))
            regs->rax = (unsigned long)-ERESTARTNOHAND;
    }
    return result;
}
#endif
