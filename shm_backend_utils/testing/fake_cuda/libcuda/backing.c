/* Memory that other processes reach through /proc/PID/fd: it ends with its owner, without leftovers.
 *
 * Each file ends with control pages: the exports, which of them are freed, and the processes that have them open.
 */
#include "driver.h"
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC 0xfa4ecdau

static uint64_t who(void) { return (uint64_t)getpid() << 8 | (uint64_t)the_process; }

uint64_t start_time(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[size > 0 ? size : 0] = 0;
  char *field = strrchr(text, ')'); /* the name before it may have spaces */
  char state = 0;
  unsigned long long started = 0;
  if (!field || sscanf(field + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                       &state, &started) != 2)
    return 0;
  return state == 'Z' || state == 'X' ? 0 : started;
}

static void name_of(uint64_t nonce, char *name, size_t size) {
  snprintf(name, size, "fake-cuda-%016llx", (unsigned long long)nonce);
}

int new_file(uint64_t nonce, size_t byte_size) {
  char name[40];
  name_of(nonce, name, sizeof name);
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, (off_t)byte_size)) {
    close(fd);
    return -1;
  }
  return fd;
}

static int seen_pid(void) { return settings.seen[the_process].pid ? settings.seen[the_process].pid : getpid(); }

void fill_handle(struct ipc_handle *handle, int device, int fd, uint64_t nonce) {
  memset(handle, 0, sizeof *handle);
  handle->magic = MAGIC;
  handle->pid = getpid();
  handle->seen_pid = seen_pid();
  handle->fd = fd;
  handle->nonce = nonce;
  handle->process = (uint16_t)the_process;
  handle->pid_namespace = settings.seen[the_process].pid_namespace;
  memcpy(handle->uuid, settings.uuids[device], 16);
}

/* Opens the file that a handle means. */
CUresult open_file(const struct ipc_handle *handle, int *fd, int *device) {
  if (handle->magic != MAGIC) return CUDA_ERROR_INVALID_VALUE;
  if (handle->pid_namespace != settings.seen[the_process].pid_namespace) /* as in CUDA, which knows only pids */
    return handle->seen_pid == seen_pid() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
  if (handle->pid == getpid() && handle->process == the_process) return CUDA_ERROR_INVALID_CONTEXT;
  for (*device = 0; *device < settings.devices; ++*device)
    if (!memcmp(handle->uuid, settings.uuids[*device], 16)) break;
  if (*device == settings.devices) return CUDA_ERROR_INVALID_VALUE;
  char path[64], expected[64] = "/memfd:", found[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
  name_of(handle->nonce, expected + 7, sizeof expected - 7);
  strcat(expected, " (deleted)");
  ssize_t length = readlink(path, found, sizeof found - 1);
  found[length > 0 ? length : 0] = 0;
  *fd = strcmp(found, expected) ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (*fd >= 0) return CUDA_SUCCESS;
  return start_time(handle->pid) ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_MAP_FAILED;
}

struct export *find_export(struct control *control, uint64_t id) {
  for (int i = 0; i < EXPORTS; i++) if (control->exports[i].id == id) return &control->exports[i];
  return NULL;
}

struct export *add_export(struct control *control, uint64_t id) {
  struct export *export = find_export(control, id);
  for (int i = 0; !export && i < EXPORTS; i++) {
    struct export *old = &control->exports[i];
    if (!old->id || (old->is_freed && !living_openers(control, old))) export = old;
  }
  if (export && export->id != id) *export = (struct export){id, 0, 0};
  return export;
}

/* Claims a place in the table of openers; other processes do so at the same time. */
struct opener *add_opener(struct control *control, struct export *export) {
  for (int i = 0; i < OPENERS; i++) {
    struct opener *opener = &control->openers[i];
    uint64_t old = __atomic_load_n(&opener->who, __ATOMIC_ACQUIRE);
    if (old && start_time((int)(old >> 8)) == opener->started) continue; /* it lives */
    if (!__atomic_compare_exchange_n(&opener->who, &old, who(), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
    opener->export = (uint32_t)(export - control->exports);
    opener->started = start_time(getpid());
    opener->count = 1;
    return opener;
  }
  return NULL;
}

int living_openers(struct control *control, const struct export *export) {
  int living = 0;
  for (int i = 0; i < OPENERS; i++) {
    struct opener *opener = &control->openers[i];
    uint64_t process = __atomic_load_n(&opener->who, __ATOMIC_ACQUIRE);
    if (process && opener->export == (uint32_t)(export - control->exports))
      living += start_time((int)(process >> 8)) == opener->started;
  }
  return living;
}
