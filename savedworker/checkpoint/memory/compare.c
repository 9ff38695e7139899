/* Loaded into the agent: compares the pages of a window with what a file has of them, in one go and outside of Python's lock. */
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#define WORDS 512 /* of a page */

#ifdef __x86_64__
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* The sum of the words of `before`; `now`, if it is another page, becomes its difference from that. */
WIDE static uint64_t compare_page(uint64_t *now, const uint64_t *before, uint8_t *differs)
{
    uint64_t sum = 0, others = 0;

    for (int i = 0; i < WORDS; i++) {
        sum += before[i];
        others |= now[i] ^ before[i];
    }
    *differs = others != 0;
    if (others)
        for (int i = 0; i < WORDS; i++)
            now[i] ^= before[i];
    return sum;
}

/* For each of the `count` pages of `content` whose numbers are `rows`, which lie in the file one after the other from `offset` on: the
 * sum of what the file has, into `sums`, and whether the page is another one, into `differs` at its number. `room` has space for
 * `pages` pages. Returns 0 or an errno; EIO for a file that ends too early. */
int compare(int fd, int64_t offset, uint64_t *content, const int64_t *rows, int64_t count, uint64_t *room, int64_t pages, uint64_t *sums,
            uint8_t *differs)
{
    for (int64_t at = 0; at < count; at += pages) {
        int64_t part = count - at < pages ? count - at : pages;
        char *into = (char *)room, *end = (char *)(room + part * WORDS);

        while (into < end) {
            ssize_t got = pread(fd, into, end - into, offset);

            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0)
                return errno;
            if (!got)
                return EIO;
            into += got;
            offset += got;
        }
        for (int64_t i = 0; i < part; i++)
            sums[at + i] = compare_page(content + rows[at + i] * WORDS, room + i * WORDS, differs + rows[at + i]);
    }
    return 0;
}
