/* Loaded into every process of a run (LD_PRELOAD): it moves the wall clock and slows the disk, as a file says.

   The file named by FAULTS_CONTROL is mapped by all of them and by the test, so that a change holds everywhere at
   once. Monotonic clocks stay as they are, as they do when somebody sets the clock of a machine. Writes are slowed on
   files under the folder FAULTS_ROOT alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NS_A_SECOND 1000000000LL

/* The layout that shim.py knows: six little-endian 64-bit integers. */
struct control {
    _Atomic int64_t clock_offset_ns;
    /* Longest delay of one call; each delay is drawn evenly from half of it to all of it. 0: none. */
    _Atomic int64_t write_delay_us;
    _Atomic int64_t sync_delay_us;
    /* What was done so far. */
    _Atomic int64_t num_moved_clocks;
    _Atomic int64_t num_slow_writes;
    _Atomic int64_t num_slow_syncs;
};

static struct control unused;
static struct control *control = &unused;
static char root[PATH_MAX];
static size_t root_length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTS_CONTROL");
    const char *folder = getenv("FAULTS_ROOT");
    if (path == NULL || folder == NULL || realpath(folder, root) == NULL)
        return;
    root_length = strlen(root);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED)
        control = mapped;
}

/* The function of the same name that would have been called without this file. */
#define NEXT(name)                                                                                                     \
    static __typeof__(&name) next;                                                                                     \
    if (next == NULL)                                                                                                  \
    next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* ---------------------------------------------------------------- the clock */

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int result = next(clock, now);
    int64_t offset = control->clock_offset_ns;
    if (result != 0 || offset == 0 || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return result;
    int64_t moved = now->tv_sec * NS_A_SECOND + now->tv_nsec + offset;
    now->tv_sec = moved / NS_A_SECOND;
    now->tv_nsec = moved % NS_A_SECOND;
    control->num_moved_clocks++;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result != NULL)
        *result = now.tv_sec;
    return now.tv_sec;
}

/* ---------------------------------------------------------------- the disk */

static int is_under_root(int fd) {
    char link[32], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path);
    return length > (ssize_t)root_length && memcmp(path, root, root_length) == 0 && path[root_length] == '/';
}

static void delay(int fd, int64_t longest_us, _Atomic int64_t *count) {
    static __thread unsigned seed;
    if (longest_us <= 0)
        return;
    int before = errno;
    if (is_under_root(fd)) {
        if (seed == 0)
            seed = ((unsigned)getpid() ^ (unsigned)(uintptr_t)&seed) | 1;
        int64_t us = longest_us / 2 + rand_r(&seed) % (longest_us / 2 + 1);
        struct timespec pause = {us / 1000000, us % 1000000 * 1000};
        nanosleep(&pause, NULL);
        (*count)++;
    }
    errno = before;
}

#define SLOW(name, parameters, arguments, result, kind)                                                                \
    result name parameters {                                                                                           \
        NEXT(name);                                                                                                    \
        delay(fd, control->kind##_delay_us, &control->num_slow_##kind##s);                                             \
        return next arguments;                                                                                         \
    }

SLOW(write, (int fd, const void *data, size_t size), (fd, data, size), ssize_t, write)
SLOW(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), ssize_t, write)
SLOW(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), ssize_t, write)
SLOW(writev, (int fd, const struct iovec *parts, int num), (fd, parts, num), ssize_t, write)
SLOW(pwritev, (int fd, const struct iovec *parts, int num, off_t at), (fd, parts, num, at), ssize_t, write)
SLOW(fsync, (int fd), (fd), int, sync)
SLOW(fdatasync, (int fd), (fd), int, sync)
