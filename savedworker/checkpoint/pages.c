/* Loaded into criu: with SAVEDWORKER_PAGES=live a dump does not write the private memory of its processes.
 *
 * The pages files that it leaves are empty; the agent reads the memory from the frozen processes themselves, in CRIU's
 * post-dump action, by the pagemap files that tell the rest. So nothing is copied into the page cache inside the freeze,
 * and what did not change since the base is never written anywhere.
 *
 * CRIU (4.2.1, criu/mem.c) has the code that it puts into a process fill a pipe: it sends it a command, then the pipe's end, and waits
 * for the answer; then it moves the pages from the pipe to the file by splice. The first pipes are really filled, and go to /dev/null:
 * that shows which command it is, and that this CRIU does empty them so. From then on the command is not sent: it is answered here, the
 * pipe stays empty and the splice is said to have moved what it should. A command that no pipe follows at once is sent after all.
 *
 * Shared memory (memfd, System V and anonymous) is written as ever: CRIU fills those pipes itself, by vmsplice.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name)                            \
    ({                                        \
        static __typeof__(&name) next;        \
        if (!next)                            \
            next = dlsym(RTLD_NEXT, #name);   \
        next;                                 \
    })

struct message { /* struct ctl_msg of CRIU */
    uint32_t command, answered;
    int32_t error;
};

/* Where what a pipe holds comes from. Both of its ends have one inode. */
enum filler { PROCESS, CRIU, NOBODY };

static struct pipe {
    ino_t inode;
    enum filler filler;
    uint32_t command; /* that a PROCESS got */
} *pipes;
static size_t count;

static struct message last, held;
static int last_to = -1, held_for = -1, answered_for = -1;
static uint32_t fill; /* the command, once it is known */

static bool is_live(void)
{
    static int live = -1;
    const char *wanted;

    if (live < 0)
        live = (wanted = getenv("SAVEDWORKER_PAGES")) && !strcmp(wanted, "live");
    return live;
}

/* What is known of a pipe; NULL if nothing is. */
static struct pipe *known(int fd)
{
    struct stat found;

    if (!fstat(fd, &found))
        for (size_t i = count; i-- > 0;)
            if (pipes[i].inode == found.st_ino)
                return pipes + i;
    return NULL;
}

static bool note(int fd, enum filler filler, uint32_t command)
{
    struct pipe *pipe = known(fd), *more;
    struct stat found;

    if (!pipe) {
        if (fstat(fd, &found) || !(more = realloc(pipes, (count + 1) * sizeof *pipes)))
            return false;
        pipes = more;
        pipe = pipes + count++;
        pipe->inode = found.st_ino;
    }
    pipe->filler = filler;
    pipe->command = command;
    return true;
}

static bool is_pages(int fd)
{
    char link[64], path[4096];
    const char *name;
    ssize_t length;
    int number, end = 0;

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length <= 0)
        return false;
    path[length] = 0;
    name = strrchr(path, '/');
    return name && sscanf(name, "/pages-%d.img%n", &number, &end) == 1 && end && !name[end];
}

/* The pipe that a message hands over, if that is all; else -1. */
static int pipe_in(const struct msghdr *message)
{
    const struct cmsghdr *header = CMSG_FIRSTHDR(message);
    struct stat found;
    int fd;

    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS ||
        header->cmsg_len != CMSG_LEN(sizeof fd))
        return -1;
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return !fstat(fd, &found) && S_ISFIFO(found.st_mode) ? fd : -1;
}

static bool send_held(void)
{
    int to = held_for;

    held_for = -1;
    return to < 0 || NEXT(send)(to, &held, sizeof held, 0) == sizeof held;
}

ssize_t send(int to, const void *data, size_t length, int flags)
{
    if (!send_held())
        return -1;
    last_to = -1;
    if (is_live() && length == sizeof last && !flags) {
        memcpy(&last, data, sizeof last);
        if (!last.answered && !last.error)
            last_to = to;
        if (last_to >= 0 && answered_for < 0 && fill && last.command == fill) {
            held = last;
            held_for = to;
            return length;
        }
    }
    return NEXT(send)(to, data, length, flags);
}

ssize_t sendmsg(int to, const struct msghdr *message, int flags)
{
    int pipe = last_to >= 0 && last_to == to ? pipe_in(message) : -1;
    ssize_t length = 0;

    last_to = -1;
    if (pipe >= 0 && held_for == to && note(pipe, NOBODY, 0)) {
        held_for = -1;
        answered_for = to;
        for (size_t i = 0; i < message->msg_iovlen; i++)
            length += message->msg_iov[i].iov_len;
        return length;
    }
    if (!send_held() || (pipe >= 0 && !note(pipe, PROCESS, last.command)))
        return -1;
    return NEXT(sendmsg)(to, message, flags);
}

ssize_t recv(int from, void *data, size_t length, int flags)
{
    last_to = -1;
    if (from >= 0 && from == answered_for && length == sizeof held) {
        struct message answer = {.command = held.command, .answered = held.command};

        answered_for = -1;
        memcpy(data, &answer, sizeof answer);
        return sizeof answer;
    }
    if (!send_held())
        return -1;
    return NEXT(recv)(from, data, length, flags);
}

ssize_t vmsplice(int fd, const struct iovec *pages, size_t number, unsigned flags)
{
    if (!note(fd, CRIU, 0))
        return -1;
    return NEXT(vmsplice)(fd, pages, number, flags);
}

ssize_t splice(int from, off_t *from_at, int to, off_t *to_at, size_t length, unsigned flags)
{
    static int nowhere = -1;
    struct pipe *pipe = is_live() && is_pages(to) ? known(from) : NULL;
    ssize_t moved;

    if (!pipe || pipe->filler == CRIU)
        return NEXT(splice)(from, from_at, to, to_at, length, flags);
    if (pipe->filler == NOBODY)
        return length;
    if (nowhere < 0)
        nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (nowhere < 0)
        return -1;
    moved = NEXT(splice)(from, from_at, nowhere, to_at, length, flags);
    if (moved > 0 && !fill)
        fill = pipe->command;
    return moved;
}
