// Preloaded into a process: counts the calls of the system that touch files under one folder, and makes one of them
// fail or kill the process. Armed from Python through the variables below.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

char fault_prefix[PATH_MAX];  // of the paths that count; empty: none
int fault_at;                 // the number of the first call that fails; 0: only count
int fault_calls = 1;          // how many fail from there on
int fault_errno;              // what they answer; 0: the process is killed instead
int fault_seen;               // calls counted so far
char fault_name[64];          // the first that failed

static int starts_with_prefix(const char* path) {
  return fault_prefix[0] && strncmp(path, fault_prefix, strlen(fault_prefix)) == 0;
}

static int counts_fd(int fd) {
  if (!fault_prefix[0]) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return starts_with_prefix(path);
}

static int counts_at(int fd, const char* path) {
  if (!fault_prefix[0]) return 0;
  return path[0] == '/' ? starts_with_prefix(path) : fd != AT_FDCWD && counts_fd(fd);
}

// Whether this call is to fail; sets errno. Does not return where it is to kill.
static int fails(const char* name) {
  int number = __atomic_add_fetch(&fault_seen, 1, __ATOMIC_SEQ_CST);
  if (!fault_at || number < fault_at || number >= fault_at + fault_calls) return 0;
  if (number == fault_at) strncpy(fault_name, name, sizeof fault_name - 1);
  if (!fault_errno) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  errno = fault_errno;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FD(type, name, parameters, arguments) \
  type name parameters { return counts_fd(fd) && fails(#name) ? -1 : REAL(name) arguments; }
#define ON_PATH(type, name, parameters, arguments) \
  type name parameters { return counts_at(AT_FDCWD, path) && fails(#name) ? -1 : REAL(name) arguments; }
#define ON_PATH_AT(type, name, parameters, arguments) \
  type name parameters { return counts_at(fd, path) && fails(#name) ? -1 : REAL(name) arguments; }

#define OPEN(name)                                                               \
  int name(const char* path, int flags, ...) {                                   \
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    return counts_at(AT_FDCWD, path) && fails(#name) ? -1 : REAL(name)(path, flags, mode); \
  }
#define OPENAT(name)                                                             \
  int name(int fd, const char* path, int flags, ...) {                           \
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    return counts_at(fd, path) && fails(#name) ? -1 : REAL(name)(fd, path, flags, mode); \
  }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

ON_FD(ssize_t, read, (int fd, void* buffer, size_t n), (fd, buffer, n))
ON_FD(ssize_t, write, (int fd, const void* buffer, size_t n), (fd, buffer, n))
ON_FD(ssize_t, pread, (int fd, void* buffer, size_t n, off_t o), (fd, buffer, n, o))
ON_FD(ssize_t, pread64, (int fd, void* buffer, size_t n, off64_t o), (fd, buffer, n, o))
ON_FD(ssize_t, pwrite, (int fd, const void* buffer, size_t n, off_t o), (fd, buffer, n, o))
ON_FD(ssize_t, pwrite64, (int fd, const void* buffer, size_t n, off64_t o), (fd, buffer, n, o))
ON_FD(ssize_t, preadv, (int fd, const struct iovec* v, int n, off_t o), (fd, v, n, o))
ON_FD(ssize_t, preadv64, (int fd, const struct iovec* v, int n, off64_t o), (fd, v, n, o))
ON_FD(ssize_t, pwritev, (int fd, const struct iovec* v, int n, off_t o), (fd, v, n, o))
ON_FD(ssize_t, pwritev64, (int fd, const struct iovec* v, int n, off64_t o), (fd, v, n, o))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, ftruncate, (int fd, off_t n), (fd, n))
ON_FD(int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_FD(int, fallocate, (int fd, int mode, off_t o, off_t n), (fd, mode, o, n))
ON_FD(int, fallocate64, (int fd, int mode, off64_t o, off64_t n), (fd, mode, o, n))
ON_FD(int, flock, (int fd, int what), (fd, what))
ON_PATH(int, mkdir, (const char* path, mode_t mode), (path, mode))
ON_PATH(int, unlink, (const char* path), (path))
ON_PATH(int, rmdir, (const char* path), (path))
ON_PATH(int, rename, (const char* path, const char* other), (path, other))
ON_PATH_AT(int, unlinkat, (int fd, const char* path, int flags), (fd, path, flags))
ON_PATH_AT(int, renameat2, (int fd, const char* path, int ofd, const char* other, unsigned f), (fd, path, ofd, other, f))

// These two answer the error itself.
int posix_fallocate(int fd, off_t o, off_t n) {
  return counts_fd(fd) && fails("posix_fallocate") ? errno : REAL(posix_fallocate)(fd, o, n);
}
int posix_fallocate64(int fd, off64_t o, off64_t n) {
  return counts_fd(fd) && fails("posix_fallocate64") ? errno : REAL(posix_fallocate64)(fd, o, n);
}
