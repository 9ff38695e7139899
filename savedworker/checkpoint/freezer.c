/* Loaded into criu: it looks sooner whether the cgroup is frozen.
 *
 * CRIU (4.2.1, criu/seize.c) asks the freezer of cgroup v1 at once and then every 100 ms, while a cgroup takes a few
 * milliseconds: most of a small dump's freeze is that pause. The first looks come after 2 ms each; a freezer that takes longer is
 * looked at as ever.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

#define STEP 100000000L
#define SOONER 2000000L
#define LOOKS 25

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    static int (*next)(const struct timespec *, struct timespec *);
    static int looks;
    const struct timespec sooner = {.tv_nsec = SOONER};

    if (!next)
        next = dlsym(RTLD_NEXT, "nanosleep");
    if (wanted->tv_sec == 0 && wanted->tv_nsec == STEP && looks < LOOKS) {
        looks++;
        wanted = &sooner;
    }
    return next(wanted, left);
}
