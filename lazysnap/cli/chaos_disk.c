/* Faults of a disk, for programs that `lazysnap chaos` starts: preloaded, it stands before the C library's calls that
   write to files below LAZYSNAP_CHAOS_DIR. The file LAZYSNAP_CHAOS_DISK says which fault there is at this moment. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NONE, FULL, SLOW, HANG };
enum { CHUNK = 1 << 16, CALL_MS = 16 }; /* SLOW: 4 MB/s */

static volatile int *control; /* the fault, and how many calls met one */
static const char *place;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("LAZYSNAP_CHAOS_DISK"), *directory = getenv("LAZYSNAP_CHAOS_DIR");
  int fd = path && directory ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *memory = mmap(NULL, 2 * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  place = strdup(directory);
  if (memory != MAP_FAILED) control = memory;
}

/* The fault that a call on this file meets. */
static int fault(int fd) {
  char link[40], path[PATH_MAX + 1];
  if (!control || *control == NONE) return NONE;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, PATH_MAX);
  if (size < 0) return NONE;
  path[size] = 0;
  if (strncmp(path, place, strlen(place)) || path[strlen(place)] != '/') return NONE;
  __sync_fetch_and_add(control + 1, 1);
  return *control;
}

/* How many of that many bytes may be written now; -1: none, there is an error. */
static ssize_t part(int fd, size_t size) {
  int found = fault(fd), error = errno;
  const struct timespec ms = {0, 1000000};
  if (found == FULL) {
    errno = ENOSPC;
    return -1;
  }
  for (int n = 0; found != NONE && *control == found && (found == HANG || n < CALL_MS); n++) nanosleep(&ms, NULL);
  errno = error;
  return found == SLOW && size > CHUNK ? CHUNK : (ssize_t)size;
}

#define IN_PARTS(call)                                                         \
  size_t done = 0;                                                             \
  do {                                                                         \
    ssize_t now = part(fd, size - done), got = now < 0 ? now : (call);         \
    if (got < 0) return done ? (ssize_t)done : got;                            \
    done += got;                                                               \
    if (got < now) break;                                                      \
  } while (done < size);                                                       \
  return done;
#define AT_ONCE(name, ...) return part(fd, 0) < 0 ? -1 : NEXT(name)(__VA_ARGS__);

ssize_t write(int fd, const void *data, size_t size) {
  IN_PARTS(NEXT(write)(fd, (const char *)data + done, now))
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  IN_PARTS(NEXT(pwrite)(fd, (const char *)data + done, now, at + done))
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  IN_PARTS(NEXT(pwrite64)(fd, (const char *)data + done, now, at + done))
}
ssize_t writev(int fd, const struct iovec *parts, int count) { AT_ONCE(writev, fd, parts, count) }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { AT_ONCE(pwritev, fd, parts, count, at) }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { AT_ONCE(pwritev64, fd, parts, count, at) }
ssize_t sendfile(int fd, int from, off_t *at, size_t size) { AT_ONCE(sendfile, fd, from, at, size) }
ssize_t sendfile64(int fd, int from, off64_t *at, size_t size) { AT_ONCE(sendfile64, fd, from, at, size) }
ssize_t copy_file_range(int from, off64_t *in, int fd, off64_t *out, size_t size, unsigned flags) {
  AT_ONCE(copy_file_range, from, in, fd, out, size, flags)
}
int fallocate(int fd, int mode, off_t at, off_t size) { AT_ONCE(fallocate, fd, mode, at, size) }
int fallocate64(int fd, int mode, off64_t at, off64_t size) { AT_ONCE(fallocate64, fd, mode, at, size) }
int posix_fallocate(int fd, off_t at, off_t size) {
  return part(fd, 0) < 0 ? ENOSPC : NEXT(posix_fallocate)(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
  return part(fd, 0) < 0 ? ENOSPC : NEXT(posix_fallocate64)(fd, at, size);
}
int fsync(int fd) { AT_ONCE(fsync, fd) }
int fdatasync(int fd) { AT_ONCE(fdatasync, fd) }
