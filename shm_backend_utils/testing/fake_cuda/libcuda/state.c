/* The lock, the start of a call, errors on demand, counts of calls, and uses that CUDA leaves undefined. */
#include "driver.h"
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/random.h>
#include <unistd.h>

pthread_mutex_t the_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
__thread int the_process;
__thread int is_in_host_function;
struct settings settings = {.devices = 2, .driver_version = 13000, .delay_us = 200, .ipc_us = 50,
                            .memory_bytes = (size_t)4 << 30, .max_pitch = MAX_PITCH, .context_bytes = (size_t)524 << 20};

struct failure { struct failure *next; int process, times; CUresult error; };
struct function { struct function *next; char name[48]; uint64_t calls[PROCESSES]; struct failure *failures; };
static struct function *functions;
static int is_initialized, is_forked;

#define MOST_VIOLATIONS 1000
static char *violations[MOST_VIOLATIONS];
static int violation_count;

static const struct { const char *name, *text; int number; } errors[] = {
#define ERROR_ROW(name, number, text) {#name, text, number},
  ERRORS(ERROR_ROW)
};
#define ERROR_COUNT ((int)(sizeof errors / sizeof *errors))

const char *error_name(CUresult error) {
  for (int i = 0; i < ERROR_COUNT; i++) if (errors[i].number == error) return errors[i].name;
  return NULL;
}

int error_number(const char *name) {
  for (int i = 0; i < ERROR_COUNT; i++) if (!strcmp(errors[i].name, name)) return errors[i].number;
  return -1;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = error_name(error);
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = NULL;
  for (int i = 0; i < ERROR_COUNT; i++) if (errors[i].number == error) *text = errors[i].text;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static long environment(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

static uint64_t hash_of(const char *text) { /* FNV-1a */
  uint64_t hash = 14695981039346656037u;
  for (; text && *text; text++) hash = (hash ^ (unsigned char)*text) * 1099511628211u;
  return hash;
}

static void read_uuids(const char *text) { /* 32 hexadecimal digits each, separated by commas */
  for (int device = 0; device < DEVICES; device++) {
    memset(settings.uuids[device], 0xfa, 16);
    settings.uuids[device][15] = (unsigned char)device;
    for (int i = 0; text && i < 16 && text[0] && text[1]; i++, text += 2)
      sscanf(text, "%2hhx", &settings.uuids[device][i]);
    if (text && *text == ',') text++;
    else text = NULL;
  }
}

/* Forgives what is named, separated by commas, and nothing else; returns whether all names are known. */
EXPORT int fake_cuda_forgive(const char *names) {
#define TRUTH_NAME(name, text) text,
  static const char *const known[] = {TRUTHS(TRUTH_NAME)};
  unsigned forgiven = 0, count = sizeof known / sizeof *known, i;
  while (names && *names) {
    size_t length = strcspn(names, ",");
    for (i = 0; i < count && (strlen(known[i]) != length || strncmp(known[i], names, length)); i++) continue;
    if (i == count) return 0;
    forgiven |= 1u << i;
    names += length + (names[length] == ',');
  }
  lock();
  settings.forgiven = forgiven;
  return unlock(1);
}

static void before_fork(void) { lock(); }
static void after_fork(void) { unlock(0); }
static void in_child(void) {
  is_forked = is_initialized; /* a driver that was used before a fork cannot be used in the child */
  pthread_mutex_init(&the_lock, NULL);
}

CUresult initialize(void) {
  if (is_forked) return CUDA_ERROR_NOT_INITIALIZED;
  if (settings.devices <= 0) return CUDA_ERROR_NO_DEVICE;
  lock();
  is_initialized = 1;
  return unlock(CUDA_SUCCESS);
}

static struct function *function_of(const char *name) {
  for (struct function *one = functions; one; one = one->next) if (!strcmp(one->name, name)) return one;
  struct function *one = calloc(1, sizeof *one);
  snprintf(one->name, sizeof one->name, "%s", name);
  one->next = functions;
  return functions = one;
}

static CUresult demanded(struct function *function) {
  for (struct failure **at = &function->failures; *at; at = &(*at)->next) {
    struct failure *failure = *at;
    if (failure->process >= 0 && failure->process != the_process) continue;
    CUresult error = failure->error;
    if (--failure->times == 0) { *at = failure->next; free(failure); }
    return error;
  }
  return CUDA_SUCCESS;
}

CUresult enter(struct function **kept, const char *name) {
  if (is_forked) return CUDA_ERROR_NOT_INITIALIZED;
  if (is_in_host_function) return CUDA_ERROR_NOT_PERMITTED; /* a host function must not call CUDA */
  lock();
  if (!*kept) *kept = function_of(name);
  (*kept)->calls[the_process]++;
  CUresult error = demanded(*kept);
  int works_before = !strcmp(name, "cuInit") || !strcmp(name, "cuDriverGetVersion");
  return unlock(error || is_initialized || works_before ? error : CUDA_ERROR_NOT_INITIALIZED);
}

void violation(const char *format, ...) {
  char text[300];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (violation_count < MOST_VIOLATIONS) violations[violation_count++] = strdup(text);
  const char *path = getenv("SHM_FAKE_CUDA_VIOLATIONS"); /* the file for all processes of a test */
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  if (file >= 0) {
    dprintf(file, "%d: %s\n", getpid(), text);
    close(file);
  }
}

uint64_t new_number(void) {
  static uint64_t number;
  return __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED);
}

uint64_t new_nonce(void) {
  uint64_t nonce = 0;
  while (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce || !nonce) continue;
  return nonce;
}

EXPORT void fake_cuda_set_process(int process) { the_process = process >= 0 && process < PROCESSES ? process : 0; }
EXPORT int fake_cuda_process(void) { return the_process; }
EXPORT void fake_cuda_set_delay(uint64_t microseconds) { lock(); settings.delay_us = microseconds; unlock(0); }

EXPORT void fake_cuda_set_max_pitch(size_t size) { lock(); settings.max_pitch = size ? size : MAX_PITCH; unlock(0); }

EXPORT void fake_cuda_set_lacking(const char *names) { /* separated by commas */
  lock();
  settings.has_no_virtual_memory = names && strstr(names, "virtual memory");
  settings.has_no_descriptors = settings.has_no_virtual_memory || (names && strstr(names, "descriptors"));
  unlock(0);
}

EXPORT void fake_cuda_set_namespace(int process, const char *name, int pid) {
  lock();
  settings.seen[process].pid_namespace = hash_of(name);
  settings.seen[process].pid = pid;
  unlock(0);
}

/* Returns whether the error and the function exist. */
EXPORT int fake_cuda_fail_next(const char *name, const char *error, int times, int process) {
  int number = error_number(error);
  if (number <= 0 || times <= 0 || !is_function(name)) return 0;
  lock();
  struct failure **last = &function_of(name)->failures;
  while (*last) last = &(*last)->next;
  *last = calloc(1, sizeof **last);
  **last = (struct failure){NULL, process, times, number};
  return unlock(1);
}

static void read_failures(const char *text) { /* function:error:times, separated by commas */
  char name[64], error[64];
  for (int times; text && sscanf(text, "%63[^:]:%63[^:]:%d", name, error, &times) == 3;) {
    fake_cuda_fail_next(name, error, times, -1);
    text = strchr(text, ',');
    text = text ? text + 1 : NULL;
  }
}

EXPORT uint64_t fake_cuda_count(const char *name, int process) {
  lock();
  uint64_t count = 0;
  struct function *function = function_of(name);
  for (int i = 0; i < PROCESSES; i++) if (process < 0 || process == i) count += function->calls[i];
  unlock(0);
  return count;
}

EXPORT int fake_cuda_violation(int number, char *text, size_t size) {
  lock();
  int is_there = number < violation_count;
  if (is_there) snprintf(text, size, "%s", violations[number]);
  return unlock(is_there);
}

/* Forgets what tests asked for: failures on demand, counts, violations. */
EXPORT void fake_cuda_forget(void) {
  lock();
  for (struct function *function = functions; function; function = function->next) {
    memset(function->calls, 0, sizeof function->calls);
    while (function->failures) {
      struct failure *failure = function->failures;
      function->failures = failure->next;
      free(failure);
    }
  }
  while (violation_count) free(violations[--violation_count]);
  unlock(0);
}

__attribute__((constructor)) static void load(void) {
  settings.devices = (int)environment("SHM_FAKE_CUDA_DEVICES", settings.devices);
  if (settings.devices > DEVICES) settings.devices = DEVICES;
  settings.driver_version = (int)environment("SHM_FAKE_CUDA_DRIVER_VERSION", settings.driver_version);
  settings.delay_us = (uint64_t)environment("SHM_FAKE_CUDA_DELAY_US", (long)settings.delay_us);
  settings.ipc_us = (uint64_t)environment("SHM_FAKE_CUDA_IPC_US", (long)settings.ipc_us);
  settings.context_bytes = (size_t)environment("SHM_FAKE_CUDA_CONTEXT_BYTES", (long)settings.context_bytes);
  if (!fake_cuda_forgive(getenv("SHM_FAKE_CUDA_FORGIVES"))) {
    fprintf(stderr, "the fake CUDA driver does not know all names of SHM_FAKE_CUDA_FORGIVES\n");
    abort();
  }
  settings.memory_bytes = (size_t)environment("SHM_FAKE_CUDA_MEMORY_BYTES", (long)settings.memory_bytes);
  fake_cuda_set_lacking(getenv("SHM_FAKE_CUDA_LACKS"));
  read_uuids(getenv("SHM_FAKE_CUDA_UUIDS"));
  for (int process = 0; process < PROCESSES; process++)
    settings.seen[process].pid_namespace = hash_of(getenv("SHM_FAKE_CUDA_PID_NAMESPACE")),
    settings.seen[process].pid = (int)environment("SHM_FAKE_CUDA_PID", 0);
  read_failures(getenv("SHM_FAKE_CUDA_FAIL"));
  pthread_atfork(before_fork, after_fork, in_child);
}
