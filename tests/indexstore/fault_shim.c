/*
 * A file system that fails on purpose. Loaded with LD_PRELOAD into a process that writes a store.
 *
 * Below FAULT_ROOT every write, sync, rename, truncation and mkdir is counted, from 1. The call
 * number FAULT_AT does as FAULT_KIND says:
 *
 *     eio, enospc   nothing is done, the error is returned
 *     short         half of the bytes are written and half is returned; other calls are not touched
 *     kill          half of the bytes are written, or nothing is done, and SIGKILL ends the process
 *
 * The environment is read at every call, so that a process may fork and set it for the child.
 * With FAULT_TRACE a line is appended to that file for each call that succeeded, and for each file
 * that was made: number (0 if not counted), operation, path, second path, fd, offset, length,
 * position of the bytes in FAULT_DATA; separated by tabs. The bytes written are appended there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long calls;

enum fate { RUN, CUT, KILL, FAIL };

static int below_root(const char *path) {
    const char *root = getenv("FAULT_ROOT");
    return root && *root && !strncmp(path, root, strlen(root)) &&
           (path[strlen(root)] == '/' || !path[strlen(root)]);
}

/* Fill `path` with what `fd` is open on; say whether that is below the root. */
static int is_ours(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0 && below_root(path);
}

/* Count a call and decide what becomes of it; sets errno for FAIL. */
static enum fate next(void) {
    const char *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
    if (++calls != (at ? atol(at) : 0) || !kind)
        return RUN;
    if (!strcmp(kind, "short"))
        return CUT;
    if (!strcmp(kind, "kill"))
        return KILL;
    errno = !strcmp(kind, "enospc") ? ENOSPC : EIO;
    return FAIL;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static void append(const char *file, const struct iovec *bytes, int count) {
    int fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (syscall(SYS_writev, fd, bytes, count) < 0)
        abort();
    syscall(SYS_close, fd);
}

static void trace(long number, const char *op, const char *path, const char *other, int fd,
                  long offset, long length, const struct iovec *bytes, int count) {
    const char *file = getenv("FAULT_TRACE"), *data = getenv("FAULT_DATA");
    char line[2 * PATH_MAX + 200];
    struct stat status;
    long at = 0;
    int saved = errno;
    if (!file)
        return;
    if (bytes && data) {
        at = stat(data, &status) ? 0 : status.st_size;
        append(data, bytes, count);
    }
    snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\t%d\t%ld\t%ld\t%ld\n", number, op, path, other,
             fd, offset, length, at);
    struct iovec text = {line, strlen(line)};
    append(file, &text, 1);
    errno = saved;
}

/* Write `count` buffers at `offset`, or where the file stands if it is -1. */
static ssize_t put(int fd, const struct iovec *bytes, int count, off_t offset) {
    char path[PATH_MAX];
    if (!is_ours(fd, path))
        return offset < 0 ? REAL(writev)(fd, bytes, count) : REAL(pwritev)(fd, bytes, count, offset);
    off_t start = offset < 0 ? lseek(fd, 0, SEEK_CUR) : offset;
    size_t length = 0;
    for (int i = 0; i < count; i++)
        length += bytes[i].iov_len;
    enum fate fate = next();
    if (fate == FAIL)
        return -1;
    if (fate == CUT || fate == KILL) {
        size_t half = length / 2, done = 0;
        for (int i = 0; i < count && done < half; i++) {
            size_t size = bytes[i].iov_len < half - done ? bytes[i].iov_len : half - done;
            if (REAL(pwrite)(fd, bytes[i].iov_base, size, start + done) != (ssize_t)size)
                abort();
            done += size;
        }
        if (fate == KILL)
            die();
        if (offset < 0)
            lseek(fd, start + half, SEEK_SET);
        return half;
    }
    ssize_t written =
        offset < 0 ? REAL(writev)(fd, bytes, count) : REAL(pwritev)(fd, bytes, count, offset);
    if (written == (ssize_t)length)
        trace(calls, "write", path, "", fd, start, length, bytes, count);
    return written;
}

ssize_t write(int fd, const void *bytes, size_t length) {
    struct iovec one = {(void *)bytes, length};
    return put(fd, &one, 1, -1);
}

ssize_t writev(int fd, const struct iovec *bytes, int count) {
    char path[PATH_MAX];
    if (!is_ours(fd, path))
        return syscall(SYS_writev, fd, bytes, count);
    return put(fd, bytes, count, -1);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) {
    struct iovec one = {(void *)bytes, length};
    return put(fd, &one, 1, offset);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset) {
    return pwrite(fd, bytes, length, offset);
}

ssize_t pwritev(int fd, const struct iovec *bytes, int count, off_t offset) {
    return put(fd, bytes, count, offset);
}

ssize_t pwritev64(int fd, const struct iovec *bytes, int count, off64_t offset) {
    return put(fd, bytes, count, offset);
}

/* What has no bytes to cut: run, fail or die. */
#define GUARDED(ours, call, ...)                                                                   \
    if (!(ours))                                                                                   \
        return call;                                                                               \
    enum fate fate = next();                                                                       \
    if (fate == FAIL)                                                                              \
        return -1;                                                                                 \
    if (fate == KILL)                                                                              \
        die();                                                                                     \
    int result = call;                                                                             \
    if (!result)                                                                                   \
        trace(calls, __VA_ARGS__, NULL, 0);                                                        \
    return result;

int fsync(int fd) {
    char path[PATH_MAX];
    GUARDED(is_ours(fd, path), REAL(fsync)(fd), "fsync", path, "", fd, 0, 0)
}

int fdatasync(int fd) {
    char path[PATH_MAX];
    GUARDED(is_ours(fd, path), REAL(fdatasync)(fd), "fsync", path, "", fd, 0, 0)
}

int ftruncate(int fd, off_t length) {
    char path[PATH_MAX];
    GUARDED(is_ours(fd, path), REAL(ftruncate)(fd, length), "ftruncate", path, "", fd, 0, length)
}

int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }

int mkdir(const char *path, mode_t mode) {
    GUARDED(below_root(path), REAL(mkdir)(path, mode), "mkdir", path, "", -1, 0, 0)
}

int rename(const char *from, const char *to) {
    GUARDED(below_root(from), REAL(rename)(from, to), "rename", from, to, -1, 0, 0)
}

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
    GUARDED(below_root(from), REAL(renameat2)(from_fd, from, to_fd, to, flags),
            flags & RENAME_EXCHANGE ? "exchange" : "rename", from, to, -1, 0, 0)
}

static int made(const char *path, int flags, mode_t mode) {
    struct stat status;
    int is_new = (flags & O_CREAT) && below_root(path) && lstat(path, &status);
    int fd = syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (is_new && fd >= 0)
        trace(0, "create", path, "", fd, 0, 0, NULL, 0);
    return fd;
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return made(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return made(path, flags | O_LARGEFILE, mode);
}
