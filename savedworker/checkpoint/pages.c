/* Loaded into criu: with SAVEDWORKER_PAGES=live a dump does not write the private memory of its processes.
 *
 * The pages files that it leaves are empty; the agent reads the memory from the frozen processes themselves, in CRIU's
 * post-dump action, by the pagemap files that tell the rest. So nothing is copied into the page cache inside the freeze,
 * and what did not change since the base is never written anywhere. CRIU moves pages from a pipe to the file by splice;
 * to /dev/null that costs nothing. Shared memory (memfd, System V and anonymous) is written as ever: CRIU fills its pipes
 * itself, by vmsplice, while those of a process are filled by the code that CRIU puts into it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static ino_t *shared;
static size_t pipes;

/* Whether CRIU filled this pipe itself. Both ends of a pipe have one inode. */
static bool is_shared(int pipe)
{
    struct stat found;

    if (fstat(pipe, &found))
        return true;
    for (size_t i = pipes; i-- > 0;)
        if (shared[i] == found.st_ino)
            return true;
    return false;
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

ssize_t vmsplice(int fd, const struct iovec *pages, size_t count, unsigned flags)
{
    ssize_t (*next)(int, const struct iovec *, size_t, unsigned) = dlsym(RTLD_NEXT, "vmsplice");
    struct stat found;

    if (!is_shared(fd)) {
        ino_t *more = realloc(shared, (pipes + 1) * sizeof *shared);

        if (!more || fstat(fd, &found))
            return -1;
        shared = more;
        shared[pipes++] = found.st_ino;
    }
    return next(fd, pages, count, flags);
}

ssize_t splice(int from, off_t *from_at, int to, off_t *to_at, size_t length, unsigned flags)
{
    static ssize_t (*next)(int, off_t *, int, off_t *, size_t, unsigned);
    static int live = -1, nowhere = -1;
    const char *wanted;

    if (!next)
        next = dlsym(RTLD_NEXT, "splice");
    if (live < 0)
        live = (wanted = getenv("SAVEDWORKER_PAGES")) && !strcmp(wanted, "live");
    if (!live || !is_pages(to) || is_shared(from))
        return next(from, from_at, to, to_at, length, flags);
    if (nowhere < 0)
        nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (nowhere < 0)
        return -1;
    return next(from, from_at, nowhere, to_at, length, flags);
}
