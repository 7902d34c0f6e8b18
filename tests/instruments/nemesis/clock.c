/* A host's wall clock, shifted: preloaded into every process of the host. The shift, in nanoseconds, is read from a
 * mapped file at each call, so that it can change while they run, and costs next to nothing. Only the wall clock is
 * shifted, as an operator or NTP would: what counts on from boot goes on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static const volatile int64_t *shift;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_cond_clock)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static int (*real_cnd)(cnd_t *, mtx_t *, const struct timespec *);
static int (*real_sem)(sem_t *, const struct timespec *);
static int (*real_sem_clock)(sem_t *, clockid_t, const struct timespec *);
static int (*real_lock)(pthread_mutex_t *, const struct timespec *);
static int (*real_sleep)(clockid_t, int, const struct timespec *, struct timespec *);

__attribute__((constructor)) static void start(void) {
    if (shift)
        return;
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_cond = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    real_cond_clock = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    real_cnd = dlsym(RTLD_NEXT, "cnd_timedwait");
    real_sem = dlsym(RTLD_NEXT, "sem_timedwait");
    real_sem_clock = dlsym(RTLD_NEXT, "sem_clockwait");
    real_lock = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    real_sleep = dlsym(RTLD_NEXT, "clock_nanosleep");
    const char *path = getenv("NEMESIS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    static const int64_t none = 0;
    void *mapped = file < 0 ? MAP_FAILED : mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    shift = mapped == MAP_FAILED ? &none : mapped;
    if (file >= 0)
        close(file);
}

static struct timespec plus(struct timespec at, int64_t nanoseconds) {
    int64_t all = at.tv_sec * SECOND + at.tv_nsec + nanoseconds;
    return (struct timespec){.tv_sec = all / SECOND, .tv_nsec = all % SECOND};
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    start();
    int failed = real_gettime(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *now = plus(*now, *shift);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    *now = (struct timeval){.tv_sec = at.tv_sec, .tv_usec = at.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out)
        *out = at.tv_sec;
    return at.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}

/* The kernel waits by the machine's own clock. A deadline of the clock that counts from boot is a small number, and is
 * left as it is. */
static struct timespec unshifted(const struct timespec *deadline) {
    start();
    return deadline->tv_sec > SECOND ? plus(*deadline, -*shift) : *deadline;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    struct timespec at = unshifted(deadline);
    return real_cond(cond, mutex, &at);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict deadline) {
    struct timespec at = unshifted(deadline);
    return real_cond_clock(cond, mutex, clock, &at);
}

/* C11's threads, by which librdkafka waits */
int cnd_timedwait(cnd_t *restrict cond, mtx_t *restrict mutex, const struct timespec *restrict deadline) {
    struct timespec at = unshifted(deadline);
    return real_cnd(cond, mutex, &at);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    struct timespec at = unshifted(deadline);
    return real_sem(semaphore, &at);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict deadline) {
    struct timespec at = unshifted(deadline);
    return real_sem_clock(semaphore, clock, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    struct timespec at = unshifted(deadline);
    return real_lock(mutex, &at);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    if (!(flags & TIMER_ABSTIME))
        return real_sleep(clock, flags, until, left);
    struct timespec at = unshifted(until);
    return real_sleep(clock, flags, &at, left);
}
