/* Loaded with LD_PRELOAD below Python: counts the calls that move bytes or names, and lets chosen ones go wrong.
 *
 * FAULTS is a list of rules, one a line: "call|part of the path|which|what|number".
 *   call: read, write, sync, rename, exchange, truncate, allocate, unlink, mkdir, or any.
 *   which: "5" is the fifth call that the rule fits, "5+" that and all later ones, "/5" every fifth; "@100-200" is each
 *          that touches bytes 100 to 199 of the file, where the call says which it moves.
 *   what: eio, enospc, eintr, einval: fails so. short: moves at most `number` bytes. sleep: takes `number` ms longer.
 *         hold: waits until the process calls release_faults(); held_faults() tells how many calls wait.
 *         int, term: the process gets the signal, the call goes on. kill: the process dies before the call; tear: after
 *         half of what it writes; after: when it is done.
 * The process may call set_faults(text) to have other rules from then on.
 * FAULTS_LOG is a file that gets a line for each call: "call offset nbytes path".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum what { NOTHING, FAIL, SHORT, SLEEP, HOLD, SIGNAL, KILL, TEAR, AFTER };

struct rule {
    char call[16], part[512], which[32];
    enum what what;
    long number; /* errno, bytes, ms or signal */
    atomic_long seen;
};

static struct rule rules[16];
static int num_rules;
static int log_fd = -1;
static atomic_int num_held, is_released;
static atomic_flag is_counting = ATOMIC_FLAG_INIT;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

void set_faults(const char *text) {
    memset(rules, 0, sizeof rules);
    num_rules = is_released = 0;
    while (text && *text && num_rules < 16) {
        struct rule *rule = &rules[num_rules];
        char what[16] = "";
        if (sscanf(text, "%15[^|]|%511[^|]|%31[^|]|%15[^|\n]|%ld", rule->call, rule->part, rule->which, what,
                   &rule->number) >= 4) {
            if (!strcmp(what, "eio")) rule->what = FAIL, rule->number = EIO;
            else if (!strcmp(what, "enospc")) rule->what = FAIL, rule->number = ENOSPC;
            else if (!strcmp(what, "eintr")) rule->what = FAIL, rule->number = EINTR;
            else if (!strcmp(what, "einval")) rule->what = FAIL, rule->number = EINVAL;
            else if (!strcmp(what, "short")) rule->what = SHORT;
            else if (!strcmp(what, "sleep")) rule->what = SLEEP;
            else if (!strcmp(what, "hold")) rule->what = HOLD, rule->number = 1;
            else if (!strcmp(what, "int")) rule->what = SIGNAL, rule->number = SIGINT;
            else if (!strcmp(what, "term")) rule->what = SIGNAL, rule->number = SIGTERM;
            else if (!strcmp(what, "kill")) rule->what = KILL;
            else if (!strcmp(what, "tear")) rule->what = TEAR;
            else if (!strcmp(what, "after")) rule->what = AFTER;
            else abort();
            num_rules++;
        }
        text = strchr(text, '\n');
        if (text) text++;
    }
}

/* Once more in the child of a process that had other faults, or none. */
__attribute__((constructor)) void begin_faults(void) {
    const char *log = getenv("FAULTS_LOG");
    if (log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    set_faults(getenv("FAULTS"));
}

int held_faults(void) { return num_held; }
void release_faults(void) { is_released = 1; }

static int fits(struct rule *rule, long long offset, size_t nbytes) {
    long long from, to;
    if (sscanf(rule->which, "@%lld-%lld", &from, &to) == 2) return offset < to && offset + (long long)nbytes > from;
    long seen = ++rule->seen, wanted = atol(rule->which + (rule->which[0] == '/'));
    if (rule->which[0] == '/') return seen % wanted == 0;
    return strchr(rule->which, '+') ? seen >= wanted : seen == wanted;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* The lines of the log are in the order in which calls are counted. */
static void take_turn(void) { while (atomic_flag_test_and_set(&is_counting)) sched_yield(); }
static void end_turn(void) { atomic_flag_clear(&is_counting); }

/* What shall become of a call; *nbytes is cut where it is to be short. FAIL has set errno. */
static enum what judge(const char *call, const char *path, long long offset, size_t *nbytes) {
    int before = errno;
    take_turn();
    if (log_fd >= 0) {
        char line[PATH_MAX + 128];
        int length = snprintf(line, sizeof line, "%s %lld %zu %s\n", call, offset, nbytes ? *nbytes : 0, path);
        syscall(SYS_write, log_fd, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
    }
    for (int i = 0; i < num_rules; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->call, "any") && strcmp(rule->call, call)) continue;
        if (!strstr(path, rule->part)) continue;
        if (!fits(rule, offset, nbytes ? *nbytes : 0)) continue;
        end_turn();
        struct timespec pause = {rule->number / 1000, rule->number % 1000 * 1000000};
        switch (rule->what) {
        case FAIL: errno = (int)rule->number; return FAIL;
        case SHORT:
            if (!nbytes || *nbytes <= (size_t)rule->number) break;
            *nbytes = (size_t)rule->number;
            errno = before;
            return SHORT;
        case SLEEP: nanosleep(&pause, NULL); break;
        case HOLD:
            for (num_held++; !is_released;) nanosleep(&pause, NULL);
            num_held--;
            break;
        case SIGNAL: syscall(SYS_kill, getpid(), (int)rule->number); break;
        case KILL: die(); break;
        case TEAR: if (nbytes) *nbytes = (*nbytes + 1) / 2; errno = before; return AFTER;
        default: errno = before; return rule->what;
        }
        take_turn();
    }
    end_turn();
    errno = before;
    return NOTHING;
}

static enum what judge_fd(const char *call, int fd, long long offset, size_t *nbytes) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return NOTHING;
    path[length] = 0;
    return judge(call, path, offset, nbytes);
}

/* The whole path of a name in an open folder. */
static int path_at(int folder, const char *name, char path[2 * PATH_MAX]) {
    char link[64];
    path[0] = 0;
    if (name[0] != '/' && folder != AT_FDCWD) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, path, PATH_MAX - 2);
        if (length < 0) return 0;
        path[length] = '/', path[length + 1] = 0;
    }
    strncat(path, name, PATH_MAX - 1);
    return 1;
}

static enum what judge_at(const char *call, int folder, const char *name) {
    char path[2 * PATH_MAX];
    return path_at(folder, name, path) ? judge(call, path, 0, NULL) : NOTHING;
}

/* A direct transfer cannot be asked for an odd length, but may come back with one. */
static ssize_t shorten(ssize_t got, void *to, size_t wanted) {
    if (got <= (ssize_t)wanted) return got;
    memset((char *)to + wanted, 0xEE, (size_t)got - wanted);
    return (ssize_t)wanted;
}

static ssize_t write_buffered(int fd, const void *from, size_t n, long long at) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int other = syscall(SYS_openat, AT_FDCWD, link, O_WRONLY | O_CLOEXEC);
    if (other < 0) return -1;
    ssize_t done = syscall(SYS_pwrite64, other, from, n, at);
    close(other);
    return done;
}

#define DONE(type, verdict, expression) \
    do { \
        enum what wanted = (verdict); \
        if (wanted == FAIL) return -1; \
        type result = (expression); \
        if (wanted == AFTER) die(); \
        return result; \
    } while (0)

ssize_t read(int fd, void *to, size_t n) { REAL(read); DONE(ssize_t, judge_fd("read", fd, -1, &n), real(fd, to, n)); }
ssize_t pread(int fd, void *to, size_t n, off_t at) {
    REAL(pread);
    size_t wanted = n;
    enum what verdict = judge_fd("read", fd, at, &wanted);
    if (verdict == SHORT) return shorten(real(fd, to, n, at), to, wanted);
    DONE(ssize_t, verdict, real(fd, to, n, at));
}
ssize_t pread64(int fd, void *to, size_t n, off64_t at) {
    REAL(pread64);
    size_t wanted = n;
    enum what verdict = judge_fd("read", fd, at, &wanted);
    if (verdict == SHORT) return shorten(real(fd, to, n, at), to, wanted);
    DONE(ssize_t, verdict, real(fd, to, n, at));
}
ssize_t write(int fd, const void *from, size_t n) {
    REAL(write);
    DONE(ssize_t, judge_fd("write", fd, -1, &n), real(fd, from, n));
}
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) {
    REAL(pwrite);
    enum what verdict = judge_fd("write", fd, at, &n);
    if (verdict == SHORT || verdict == AFTER) {
        ssize_t done = write_buffered(fd, from, n, at);
        if (verdict == AFTER) die();
        return done;
    }
    DONE(ssize_t, verdict, real(fd, from, n, at));
}
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) {
    REAL(pwrite64);
    enum what verdict = judge_fd("write", fd, at, &n);
    if (verdict == SHORT || verdict == AFTER) {
        ssize_t done = write_buffered(fd, from, n, at);
        if (verdict == AFTER) die();
        return done;
    }
    DONE(ssize_t, verdict, real(fd, from, n, at));
}

/* Python hands over one vector. Of several, only the first is moved: a short transfer. */
#define READ_VECTOR(name, offset_type, parameter, argument) \
    ssize_t name(int fd, const struct iovec *vector, int count, offset_type at parameter) { \
        REAL(name); \
        if (count < 1) return real(fd, vector, count, at argument); \
        size_t wanted = vector->iov_len; \
        enum what verdict = judge_fd("read", fd, at, &wanted); \
        if (verdict == SHORT) return shorten(real(fd, vector, 1, at argument), vector->iov_base, wanted); \
        DONE(ssize_t, verdict, real(fd, vector, 1, at argument)); \
    }
#define WRITE_VECTOR(name, offset_type, parameter, argument) \
    ssize_t name(int fd, const struct iovec *vector, int count, offset_type at parameter) { \
        REAL(name); \
        if (count < 1) return real(fd, vector, count, at argument); \
        size_t wanted = vector->iov_len; \
        enum what verdict = judge_fd("write", fd, at, &wanted); \
        if (verdict == SHORT) return write_buffered(fd, vector->iov_base, wanted, at); \
        DONE(ssize_t, verdict, real(fd, vector, 1, at argument)); \
    }
#define AND ,
READ_VECTOR(preadv, off_t, , )
READ_VECTOR(preadv64, off64_t, , )
READ_VECTOR(preadv2, off_t, AND int flags, AND flags)
READ_VECTOR(preadv64v2, off64_t, AND int flags, AND flags)
WRITE_VECTOR(pwritev, off_t, , )
WRITE_VECTOR(pwritev64, off64_t, , )
WRITE_VECTOR(pwritev2, off_t, AND int flags, AND flags)
WRITE_VECTOR(pwritev64v2, off64_t, AND int flags, AND flags)

/* No drive is waited for: what a process has written outlives it, and the order of its calls is in the log. */
int fsync(int fd) { DONE(int, judge_fd("sync", fd, 0, NULL), 0); }
int fdatasync(int fd) { DONE(int, judge_fd("sync", fd, 0, NULL), 0); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); DONE(int, judge_fd("truncate", fd, n, NULL), real(fd, n)); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); DONE(int, judge_fd("truncate", fd, n, NULL), real(fd, n)); }
int fallocate(int fd, int mode, off_t at, off_t n) {
    REAL(fallocate);
    DONE(int, judge_fd("allocate", fd, n, NULL), real(fd, mode, at, n));
}
int fallocate64(int fd, int mode, off64_t at, off64_t n) {
    REAL(fallocate64);
    DONE(int, judge_fd("allocate", fd, n, NULL), real(fd, mode, at, n));
}
static enum what judge_rename(const char *call, int from, const char *old, int to, const char *new) {
    char both[4 * PATH_MAX + 8], first[2 * PATH_MAX], second[2 * PATH_MAX];
    if (!path_at(from, old, first) || !path_at(to, new, second)) return NOTHING;
    snprintf(both, sizeof both, "%s -> %s", first, second);
    return judge(call, both, 0, NULL);
}

int rename(const char *old, const char *new) {
    REAL(rename);
    DONE(int, judge_rename("rename", AT_FDCWD, old, AT_FDCWD, new), real(old, new));
}
int renameat(int from, const char *old, int to, const char *new) {
    REAL(renameat);
    DONE(int, judge_rename("rename", from, old, to, new), real(from, old, to, new));
}
int renameat2(int from, const char *old, int to, const char *new, unsigned int flags) {
    REAL(renameat2);
    DONE(int, judge_rename("exchange", from, old, to, new), real(from, old, to, new, flags));
}
int unlink(const char *path) { REAL(unlink); DONE(int, judge("unlink", path, 0, NULL), real(path)); }
int rmdir(const char *path) { REAL(rmdir); DONE(int, judge("unlink", path, 0, NULL), real(path)); }
int unlinkat(int folder, const char *name, int flags) {
    REAL(unlinkat);
    DONE(int, judge_at("unlink", folder, name), real(folder, name, flags));
}
int mkdir(const char *path, mode_t mode) { REAL(mkdir); DONE(int, judge("mkdir", path, 0, NULL), real(path, mode)); }
int mkdirat(int folder, const char *name, mode_t mode) {
    REAL(mkdirat);
    DONE(int, judge_at("mkdir", folder, name), real(folder, name, mode));
}
