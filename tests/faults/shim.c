/* Stands between a program and libc's calls for files and sockets (LD_PRELOAD): logs those for files below a folder, or
   lets one call fail.

   FAULTS_UNDER  the folder; calls about other paths pass through. Sockets count if they are TCP or UDP, have an abstract
                 name, or one below the folder, at either end
   FAULTS_LOG    file to which one line is written for each call that changed something
   FAULTS_DATA   file to which the data of these writes is appended
   FAULTS_NO_EXCHANGE  set: two folders cannot be exchanged in one step, as on NFS
   FAULTS_CONTROL  file of a `struct plan`, by which another process decides which call fails here (faulty.py writes it)

   A program may call faults_plan("CALL NUMBER ERRNO"): the NUMBER-th CALL from now on (from 1) fails with ERRNO, or,
   where that is 0, a write or send sends half of its data, and a recv takes half of what it asks for. faults_plan("")
   ends that. faults_seen(CALL) counts the calls since then. What is logged are the calls of one thread. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { KINDS = 15 };
static const char *const names[KINDS] = {"open",   "read", "write",  "fsync",   "rename", "mkdir", "unlink", "socket",
                                         "bind", "listen", "connect", "accept", "send",   "recv",  "poll"};
static struct plan { long call, number, error, seen[KINDS]; } own = {-1, 0, 0, {0}}, *plan = &own;
static const char *under;
static int log_fd = -1, data_fd = -1, exchanges = 1, ready;

static int raw_open(const char *path) {
  return path && *path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
}

__attribute__((constructor)) static void start(void) {
  under = getenv("FAULTS_UNDER");
  log_fd = raw_open(getenv("FAULTS_LOG"));
  data_fd = raw_open(getenv("FAULTS_DATA"));
  exchanges = getenv("FAULTS_NO_EXCHANGE") == NULL;
  const char *control = getenv("FAULTS_CONTROL");
  if (control && *control) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, control, O_RDWR | O_CLOEXEC, 0);
    void *map = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) abort();
    plan = map;
    syscall(SYS_close, fd);
  }
  ready = under && *under;
}

static long kind_of(const char *call) {
  for (long i = 0; i < KINDS; i++)
    if (strcmp(names[i], call) == 0) return i;
  return -1;
}

void faults_plan(const char *wanted) {
  char call[32] = "";
  long number = 0, error = 0;
  sscanf(wanted, "%31s %ld %ld", call, &number, &error);
  plan->number = 0;
  memset(plan->seen, 0, sizeof plan->seen);
  plan->call = kind_of(call);
  plan->error = error;
  plan->number = number;
}

long faults_seen(const char *call) {
  long kind = kind_of(call);
  return kind < 0 ? 0 : plan->seen[kind];
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

/* 0: go on; 1: fail, errno is set; 2: half of it. */
static int failing(const char *call) {
  long kind = kind_of(call);
  if (__atomic_add_fetch(&plan->seen[kind], 1, __ATOMIC_SEQ_CST) != plan->number || kind != plan->call) return 0;
  if (plan->error == 0) return 2;
  errno = (int)plan->error;
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

ssize_t read(int fd, void *data, size_t size) {
  char buffer[PATH_MAX];
  if (concerns(named(fd, buffer)) && failing("read") == 1) return -1;
  return syscall(SYS_read, fd, data, size);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
  char buffer[PATH_MAX];
  if (concerns(named(fd, buffer)) && failing("read") == 1) return -1;
  return syscall(SYS_pread64, fd, data, size, at);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) { return pread64(fd, data, size, at); }

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

/* -- sockets ------------------------------------------------------------------------------------------------------- */

static int is_counted(const struct sockaddr *name, socklen_t size) {
  const char *path = ((const struct sockaddr_un *)name)->sun_path;
  if (!ready || size < sizeof(sa_family_t)) return 0;
  if (name->sa_family == AF_INET || name->sa_family == AF_INET6) return 1;
  return name->sa_family == AF_UNIX && size > offsetof(struct sockaddr_un, sun_path) && (*path == 0 || concerns(path));
}

static int is_counted_socket(int fd) {
  struct sockaddr_storage name;
  socklen_t size = sizeof name;
  if (!ready) return 0;
  if (getsockname(fd, (struct sockaddr *)&name, &size) == 0 && is_counted((struct sockaddr *)&name, size)) return 1;
  size = sizeof name;
  return getpeername(fd, (struct sockaddr *)&name, &size) == 0 && is_counted((struct sockaddr *)&name, size);
}

/* The size that a call may have; 0: it fails. */
static size_t allowed_size(const char *call, int fd, size_t size) {
  int saved = errno, counted = is_counted_socket(fd);
  errno = saved;
  int found = counted && size > 0 ? failing(call) : 0;
  return found == 1 ? 0 : found == 2 && size > 1 ? size / 2 : size;
}

int socket(int family, int type, int protocol) {
  int counted = ready && (family == AF_UNIX || family == AF_INET || family == AF_INET6);
  if (counted && failing("socket") == 1) return -1;
  return (int)syscall(SYS_socket, family, type, protocol);
}

int bind(int fd, const struct sockaddr *name, socklen_t size) {
  if (is_counted(name, size) && failing("bind") == 1) return -1;
  return (int)syscall(SYS_bind, fd, name, size);
}

int listen(int fd, int backlog) {
  if (is_counted_socket(fd) && failing("listen") == 1) return -1;
  return (int)syscall(SYS_listen, fd, backlog);
}

int connect(int fd, const struct sockaddr *name, socklen_t size) {
  int fails = is_counted(name, size) && failing("connect") == 1, error = errno;
  /* A connection over a network goes on being made after a signal, connect(2). */
  if (!fails || (error == EINTR && name->sa_family != AF_UNIX)) {
    int n = (int)syscall(SYS_connect, fd, name, size);
    if (!fails) return n;
  }
  errno = error;
  return -1;
}

int accept4(int fd, struct sockaddr *name, socklen_t *size, int flags) {
  if (is_counted_socket(fd) && failing("accept") == 1) return -1;
  return (int)syscall(SYS_accept4, fd, name, size, flags);
}
int accept(int fd, struct sockaddr *name, socklen_t *size) { return accept4(fd, name, size, 0); }

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *name, socklen_t length) {
  size_t most = allowed_size("send", fd, size);
  return most == 0 && size > 0 ? -1 : syscall(SYS_sendto, fd, data, most, flags, name, length);
}
ssize_t send(int fd, const void *data, size_t size, int flags) { return sendto(fd, data, size, flags, NULL, 0); }

ssize_t recvfrom(int fd, void *data, size_t size, int flags, struct sockaddr *name, socklen_t *length) {
  size_t most = allowed_size("recv", fd, size);
  return most == 0 && size > 0 ? -1 : syscall(SYS_recvfrom, fd, data, most, flags, name, length);
}
ssize_t recv(int fd, void *data, size_t size, int flags) { return recvfrom(fd, data, size, flags, NULL, NULL); }

int poll(struct pollfd *each, nfds_t count, int milliseconds) {
  if (ready && failing("poll") == 1) return -1;
  return (int)syscall(SYS_poll, each, count, milliseconds);
}

int epoll_wait(int fd, struct epoll_event *events, int most, int milliseconds) {
  if (ready && failing("poll") == 1) return -1;
  return (int)syscall(SYS_epoll_wait, fd, events, most, milliseconds);
}
