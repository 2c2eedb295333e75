/* A CUDA driver without a GPU: what its parts share.
 *
 * One lock guards all state. Work on streams runs without it. Functions named cu... are NVIDIA's driver API; functions
 * named fake_cuda_... are for tests. A "virtual process" is a number of the calling thread: the objects of one virtual
 * process look to the others like those of another operating-system process.
 */
#ifndef FAKE_CUDA_DRIVER_H
#define FAKE_CUDA_DRIVER_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
#define PROCESSES 16
#define DEVICES 8
#define BLOCK_BYTES ((size_t)2 << 20)
#define MAX_PITCH (((size_t)1 << 31) - 1)
#define MOST_RUBBISH ((size_t)16 << 20)

typedef int CUresult;
typedef int CUdevice;
typedef uintptr_t CUdeviceptr;
typedef uintptr_t CUstream;
typedef uintptr_t CUevent;

#define ERRORS(X) \
  X(CUDA_SUCCESS, 0, "no error") \
  X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument") \
  X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory") \
  X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error") \
  X(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down") \
  X(CUDA_ERROR_STUB_LIBRARY, 34, "CUDA driver is a stub library") \
  X(CUDA_ERROR_DEVICE_UNAVAILABLE, 46, "CUDA-capable device(s) is/are busy or unavailable") \
  X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected") \
  X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal") \
  X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context") \
  X(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed") \
  X(CUDA_ERROR_UNMAP_FAILED, 206, "unmapping of buffer object failed") \
  X(CUDA_ERROR_ALREADY_MAPPED, 208, "resource already mapped") \
  X(CUDA_ERROR_NOT_MAPPED, 211, "resource not mapped") \
  X(CUDA_ERROR_ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered") \
  X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these two devices") \
  X(CUDA_ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
  X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle") \
  X(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
  X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found") \
  X(CUDA_ERROR_NOT_READY, 600, "device not ready") \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
  X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch") \
  X(CUDA_ERROR_LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated") \
  X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled") \
  X(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled") \
  X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, 708, "cannot set while device is active in this process") \
  X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed") \
  X(CUDA_ERROR_TOO_MANY_PEERS, 711, "peer mapping resources exhausted") \
  X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory is already mapped") \
  X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region") \
  X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure") \
  X(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted") \
  X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported") \
  X(CUDA_ERROR_SYSTEM_NOT_READY, 802, "system not yet initialized") \
  X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803, "system has unsupported display driver / cuda driver combination") \
  X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing") \
  X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture") \
  X(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of separate capture sequences") \
  X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream as it began") \
  X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work") \
  X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream") \
  X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906, "the legacy stream would depend on a capturing blocking stream") \
  X(CUDA_ERROR_CAPTURED_EVENT, 907, "operation not permitted on an event of a capturing stream") \
  X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908, "a capture sequence is terminated by another thread") \
  X(CUDA_ERROR_TIMEOUT, 909, "wait operation timed out") \
  X(CUDA_ERROR_UNKNOWN, 999, "unknown error")
#define ERROR_CONSTANT(name, number, text) name = number,
enum { ERRORS(ERROR_CONSTANT) };

/* ---- state.c: the lock, how a call begins, what tests ask for ---- */

extern pthread_mutex_t the_lock;
extern pthread_cond_t progress; /* work on a stream is done, or something is released */
extern __thread int the_process;
extern __thread int is_in_host_function;

struct settings {
  int devices, driver_version;
  int has_no_virtual_memory, has_no_descriptors;
  unsigned char uuids[DEVICES][16];
  uint64_t delay_us, ipc_us;
  size_t memory_bytes, max_pitch, context_bytes;
  unsigned forgiven; /* a bit for each truth */
  struct { uint64_t pid_namespace; int pid; } seen[PROCESSES]; /* as handles have it */
};
extern struct settings settings;

/* What a real driver does, and this one does not where a test forgives it: X(name, "name for tests") */
#define TRUTHS(X) \
  X(CAPTURES, "captures") /* calls for a whole context end its captures */ \
  X(WAITS, "waits") /* to free memory, or to close a handle, waits for the device; to unmap it without that is wrong */ \
  X(CONTEXTS, "contexts") /* a context takes memory */ \
  X(OPENINGS, "openings") /* to open or to close a handle takes time */
#define TRUTH_CONSTANT(name, text) name,
enum truth { TRUTHS(TRUTH_CONSTANT) };
static inline int forgives(enum truth truth) { return settings.forgiven >> truth & 1; }

struct function;
CUresult enter(struct function **kept, const char *name);
CUresult initialize(void);
int is_function(const char *name);
const char *error_name(CUresult error);
int error_number(const char *name);
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t new_number(void); /* never the same in this process */
uint64_t new_nonce(void);  /* never the same on this machine */

/* Begins every function of the API: initialized, not forked, no error on demand. Counts the call. */
#define ENTER(name) \
  do { \
    static struct function *function_; \
    CUresult refused_ = enter(&function_, name); \
    if (refused_) return refused_; \
  } while (0)

static inline void lock(void) { pthread_mutex_lock(&the_lock); }
static inline CUresult unlock(CUresult result) { pthread_mutex_unlock(&the_lock); return result; }
/* Unlocks, and returns an error. */
#define REFUSE_IF(condition, error) do { if (condition) return unlock(error); } while (0)
#define CHECK(expression) do { CUresult checked_ = (expression); if (checked_) return unlock(checked_); } while (0)

/* ---- contexts.c ---- */

struct stream;
struct context {
  int process, device, retained;
  CUresult error; /* sticky */
  struct stream *legacy, *marker;
  unsigned peers;
  uint64_t waits; /* how often the host has waited for all work there */
};
typedef struct context *CUcontext;
CUresult current_context(struct context **context); /* with its sticky error */
CUresult known_context(CUcontext context);
struct context *context_of(int process, CUdevice device);
size_t bytes_of_contexts(CUdevice device);

/* ---- backing.c: memory that other processes reach, as long as its owner has it ---- */

#define CONTROL_BYTES 16384
#define EXPORTS 300
#define OPENERS 300
struct export { uint64_t id; uint32_t is_freed, unused; };
struct opener { uint64_t who; uint32_t export, count; uint64_t started; };
struct control { /* at the end of each block's file */
  uint64_t nonce;
  struct export exports[EXPORTS];
  struct opener openers[OPENERS];
};
struct ipc_handle {
  uint32_t magic;
  int32_t pid, seen_pid, fd;
  uint64_t nonce, export_id;
  uint32_t offset;
  uint16_t process, unused;
  uint64_t pid_namespace;
  unsigned char uuid[16];
};

int new_file(uint64_t nonce, size_t byte_size);
void fill_handle(struct ipc_handle *handle, int device, int fd, uint64_t nonce);
CUresult open_file(const struct ipc_handle *handle, int *fd, int *device);
struct export *find_export(struct control *control, uint64_t id);
struct export *add_export(struct control *control, uint64_t id);
struct opener *add_opener(struct control *control, struct export *export);
int living_openers(struct control *control, const struct export *export);
uint64_t start_time(int pid); /* 0: dead */

/* ---- ranges.c: what addresses mean ---- */

enum block_kind { OWN, OPENED, MANAGED, POOL, VIRTUAL, PINNED };
struct opening { struct opening *next; struct export *export; struct opener *opener; uintptr_t address; int count; };
struct block { /* mapped as one */
  enum block_kind kind;
  int process, device, fd, uses, ranges;
  uintptr_t address; /* as CUDA names it: host code cannot reach it, but where it may */
  size_t size, next_offset;
  char *view; /* where this driver reaches the same bytes */
  uint64_t nonce;
  struct control *control;
  struct opening *openings;
};
struct range { /* allocated, opened, mapped or pinned as one */
  struct range *next;
  struct block *block;
  uintptr_t address;
  size_t size;
  uint64_t id; /* CUDA's buffer id */
  int is_accessible, is_host_allocated;
  uint64_t physical; /* of VIRTUAL: which handle is mapped */
  uint64_t waits;    /* of VIRTUAL: the context's when it was mapped */
};
extern struct range *all_ranges;
struct place { struct block *block; char *bytes; };

uintptr_t reserve(size_t size); /* PROT_NONE, aligned to 2 MiB; 0: no room */
struct range *range_at(int process, uintptr_t address);
struct range *add_range(struct block *block, uintptr_t address, size_t size);
void remove_range(struct range *range); /* and the block with its last one */
struct block *new_block(enum block_kind kind, int device, size_t size);
int is_mapped(uintptr_t address, size_t size);
CUresult resolve(int process, uintptr_t address, size_t span, struct place *place); /* held until release_place */
void release_place(struct place *place);
size_t bytes_in_use(int device);
void fill_with_rubbish(struct range *range);

/* ---- virtual.c ---- */
size_t created_bytes(int device);
int live_virtual(int process);
int is_imported(struct range *range);

/* ---- streams.c ---- */

struct dependency { struct stream *stream; uint64_t number; };
struct work {
  struct work *next;
  uint64_t number;
  int is_late, dependency_count;
  struct dependency *dependencies;
  CUresult (*run)(struct work *work, struct stream *stream); /* without the lock */
  void (*release)(struct work *work);                        /* with it */
};
enum stream_kind { NAMED, LEGACY, PER_THREAD, MARKER };
enum { STREAM_NON_BLOCKING = 1 };
struct stream {
  struct stream *next;
  CUstream handle;
  struct context *context;
  enum stream_kind kind;
  int process, priority, references, is_destroyed, has_thread;
  int is_ended; /* its process has ended: its work no longer runs */
  unsigned flags;
  pthread_t owner; /* of PER_THREAD */
  pthread_cond_t has_work;
  struct work *first, *last;
  uint64_t put, done;
  uint64_t capture; /* 0: none */
  int capture_mode, is_capture_origin, is_capture_invalid;
  pthread_t capture_thread;
};
extern struct stream *all_streams;
CUresult find_stream(CUstream handle, struct stream **stream);
struct stream *marker_of(struct context *context);
/* Puts work on a stream, or frees it where that captures. */
CUresult put_work(struct stream *stream, struct work *work);
void depend_on(struct work *work, struct dependency on);
void release_stream(struct stream *stream);
void depend_on_all(struct stream *marker, struct work *work);
void wait_for_stream(struct stream *stream);
void wait_for_context(struct context *context);
int is_at_work(struct context *context);
int is_stream_done(struct stream *stream);

/* ---- capture.c ---- */
CUresult refuse_in_capture(struct stream *stream); /* of calls that a capturing stream does not allow */
CUresult refuse_while_capturing(struct context *context); /* of calls not allowed while any stream captures */
CUresult end_captures(struct context *context); /* of calls for a whole context, which refuse, and end its captures */
CUresult implicit_capture(struct stream *stream);

/* ---- events.c ---- */
int live_events(int process);
int live_streams(int process);

/* ---- the end of a virtual process, as if it was killed ---- */
void end_contexts(int process);
void end_streams(int process);
void end_events(int process);
void end_ranges(int process);

#endif
