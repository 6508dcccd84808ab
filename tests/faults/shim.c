/* Stands between a program and libc's calls for files (LD_PRELOAD): logs those below a folder, or lets one of them fail.

   FAULTS_UNDER  the folder; calls about other paths pass through
   FAULTS_LOG    file to which one line is written for each call that changed something
   FAULTS_DATA   file to which the data of these writes is appended
   FAULTS_NO_EXCHANGE  set: two folders cannot be exchanged in one step, as on NFS

   A program may call faults_plan("CALL NUMBER ERRNO"): the NUMBER-th CALL from now on (from 1) fails with ERRNO, or,
   where that is 0, a write writes half of its data. faults_plan("") ends that. faults_seen(CALL) counts the calls since
   then. The program has one thread that writes. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KINDS = 16 };
static const char *under;
static char fail_call[32];
static long fail_number, fail_errno;
static struct { const char *call; long count; } seen[KINDS];
static int log_fd = -1, data_fd = -1, exchanges = 1, ready;

static int raw_open(const char *path) {
  return path && *path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
}

__attribute__((constructor)) static void start(void) {
  under = getenv("FAULTS_UNDER");
  log_fd = raw_open(getenv("FAULTS_LOG"));
  data_fd = raw_open(getenv("FAULTS_DATA"));
  exchanges = getenv("FAULTS_NO_EXCHANGE") == NULL;
  ready = under && *under;
}

void faults_plan(const char *plan) {
  memset(seen, 0, sizeof seen);
  fail_call[0] = 0;
  sscanf(plan, "%31s %ld %ld", fail_call, &fail_number, &fail_errno);
}

long faults_seen(const char *call) {
  for (int i = 0; i < KINDS; i++)
    if (seen[i].call && strcmp(seen[i].call, call) == 0) return seen[i].count;
  return 0;
}

static int concerns(const char *path) { return ready && path && strncmp(path, under, strlen(under)) == 0; }

static const char *absolute(int dir, const char *path, char *out) {
  char link[64];
  ssize_t n;
  if (!ready || !path || path[0] == '/') return path;
  if (dir == AT_FDCWD) strcpy(link, "/proc/self/cwd"); else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
  n = readlink(link, out, PATH_MAX / 2);
  if (n < 0) return path;
  snprintf(out + n, PATH_MAX - n, "/%s", path);
  return out;
}

static const char *named(int fd, char *out) {
  char link[64];
  ssize_t n;
  if (!ready) return NULL;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  n = readlink(link, out, PATH_MAX - 1);
  if (n < 0) return NULL;
  out[n] = 0;
  return out;
}

static void told(const char *format, ...) {
  char line[2 * PATH_MAX + 64];
  int saved = errno;
  va_list list;
  if (log_fd < 0) return;
  va_start(list, format);
  int n = vsnprintf(line, sizeof line, format, list);
  va_end(list);
  if (n > 0) syscall(SYS_write, log_fd, line, (size_t)n);
  errno = saved;
}

/* 0: go on; 1: fail, errno is set; 2: write half. */
static int failing(const char *call) {
  int i = 0;
  while (i < KINDS - 1 && seen[i].call && strcmp(seen[i].call, call) != 0) i++;
  seen[i].call = call;
  if (++seen[i].count != fail_number || strcmp(call, fail_call) != 0) return 0;
  if (fail_errno == 0) return 2;
  errno = (int)fail_errno;
  return 1;
}

static void kept(const char *path, long at, const void *data, ssize_t size) {
  told("write\t%s\t%ld\t%ld\n", path, at, (long)size);
  if (data_fd >= 0) syscall(SYS_write, data_fd, data, (size_t)size);
}

static int opened(int dir, const char *path, int flags, mode_t mode) {
  char buffer[PATH_MAX];
  const char *whole = absolute(dir, path, buffer);
  if (!concerns(whole)) return (int)syscall(SYS_openat, dir, path, flags, mode);
  int existed = (int)syscall(SYS_faccessat, AT_FDCWD, whole, F_OK) == 0;
  if (failing("open")) return -1;
  int fd = (int)syscall(SYS_openat, dir, path, flags, mode);
  if (fd >= 0 && (flags & O_CREAT) && !existed) told("create\t%s\n", whole);
  if (fd >= 0 && (flags & O_TRUNC) && existed) told("truncate\t%s\t0\n", whole);
  return fd;
}

#define MODE(flags) ({ mode_t m = 0; if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list l; va_start(l, flags); m = va_arg(l, mode_t); va_end(l); } m; })
int open(const char *path, int flags, ...) { return opened(AT_FDCWD, path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return opened(AT_FDCWD, path, flags | O_LARGEFILE, MODE(flags)); }
int openat(int dir, const char *path, int flags, ...) { return opened(dir, path, flags, MODE(flags)); }
int openat64(int dir, const char *path, int flags, ...) { return opened(dir, path, flags | O_LARGEFILE, MODE(flags)); }

static size_t allowed(const char *call, const char *path, size_t size, int *stop) {
  *stop = 0;
  if (!concerns(path)) return size;
  int found = failing(call);
  if (found == 1) *stop = 1;
  return found == 2 && size > 1 ? size / 2 : size;
}

ssize_t write(int fd, const void *data, size_t size) {
  char buffer[PATH_MAX];
  const char *path = named(fd, buffer);
  int stop;
  size = allowed("write", path, size, &stop);
  if (stop) return -1;
  ssize_t n = syscall(SYS_write, fd, data, size);
  if (n > 0 && concerns(path)) kept(path, (long)syscall(SYS_lseek, fd, 0, SEEK_CUR) - n, data, n);
  return n;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  char buffer[PATH_MAX];
  const char *path = named(fd, buffer);
  int stop;
  size = allowed("write", path, size, &stop);
  if (stop) return -1;
  ssize_t n = syscall(SYS_pwrite64, fd, data, size, at);
  if (n > 0 && concerns(path)) kept(path, (long)at, data, n);
  return n;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

static int synced(int fd, long number) {
  char buffer[PATH_MAX];
  const char *path = named(fd, buffer);
  if (concerns(path) && failing("fsync")) return -1;
  int n = (int)syscall(number, fd);
  if (n == 0 && concerns(path)) told("fsync\t%s\n", path);
  return n;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
  char one[PATH_MAX], two[PATH_MAX];
  const char *a = absolute(from_dir, from, one), *b = absolute(to_dir, to, two);
  if (concerns(b) && failing("rename")) return -1;
  if (concerns(b) && (flags & RENAME_EXCHANGE) && !exchanges) return errno = EINVAL, -1;
  int n = (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
  if (n == 0 && concerns(b)) told("%s\t%s\t%s\n", flags & RENAME_EXCHANGE ? "exchange" : "rename", a, b);
  return n;
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return renameat2(a, from, b, to, 0); }

int mkdirat(int dir, const char *path, mode_t mode) {
  char buffer[PATH_MAX];
  const char *whole = absolute(dir, path, buffer);
  if (concerns(whole) && failing("mkdir")) return -1;
  int n = (int)syscall(SYS_mkdirat, dir, path, mode);
  if (n == 0 && concerns(whole)) told("mkdir\t%s\n", whole);
  return n;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int dir, const char *path, int flags) {
  char buffer[PATH_MAX];
  const char *whole = absolute(dir, path, buffer);
  if (concerns(whole) && failing("unlink")) return -1;
  int n = (int)syscall(SYS_unlinkat, dir, path, flags);
  if (n == 0 && concerns(whole)) told("%s\t%s\n", flags & AT_REMOVEDIR ? "rmdir" : "unlink", whole);
  return n;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
