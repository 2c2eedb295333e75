/*
 * Protocol 2 of triton-shm-backend-utils: the layout of a shared-memory region.
 *
 * docs/protocol.md explains it. Needs C99 with _Static_assert (GCC, Clang), C11, or C++11, and a little-endian
 * machine, because all integers here are little-endian. No struct has padding.
 */
#ifndef SHM_PROTOCOL_H
#define SHM_PROTOCOL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define SHMBU_ASSERT(holds) static_assert(holds, #holds)
#else
#define SHMBU_ASSERT(holds) _Static_assert(holds, #holds)
#endif
#define SHMBU_AT(type, field, offset) SHMBU_ASSERT(offsetof(struct type, field) == (offset))
#define SHMBU_SIZE(type, size) SHMBU_ASSERT(sizeof(struct type) == (size))

#define SHMBU_MAGIC "SHMBUREG" /* 8 bytes, without the terminating zero */
#define SHMBU_KEY_PREFIX "shmbu-" /* of the region's name in /dev/shm; then 1 to 64 of 0-9, a-z and - */
#define SHMBU_SEALED_KEY_PREFIX "shmbu-fd-" /* of a sealed region; then the socket's digits, "-" and the number in decimal */
#define SHMBU_HANDOVER_MAGIC "shmbu-fd" /* 8 bytes, in a question and in an answer */
#define SHMBU_SLOT_PARAMETER "shm_slot"
#define SHMBU_GENERATION_PARAMETER "shm_generation"
#define SHMBU_BATCH_INPUT "SHM"

enum {
    SHMBU_VERSION = 2,
    SHMBU_PAGE_SIZE = 4096,
    SHMBU_TOKEN_LENGTH = 16,
    SHMBU_HANDLE_LENGTH = 64, /* CUipcMemHandle */
    SHMBU_MAX_SLOT_COUNT = 1024,
    SHMBU_MAX_RECORD_BYTE_SIZE = 1 << 20,
    SHMBU_MAX_KEY_LENGTH = 70,
    SHMBU_SOCKET_LENGTH = 32, /* hexadecimal digits, lower case: the name of the socket that hands sealed regions over */
    SHMBU_MAX_TENSORS = 512, /* inputs and outputs of a table together; outputs of results */
    SHMBU_MAX_REGIONS = 64, /* further regions of a table; events of results */
    SHMBU_MAX_RANK = 32,
    SHMBU_MAX_FRAMES = 64,
    SHMBU_NO_FENCE = 0xffff
};
#define SHMBU_MAX_GENERATION INT64_MAX
#define SHMBU_MAX_FRAMED_GENERATION UINT32_MAX /* of a request that has a ring */

/* Bytes of the region's file to lock with F_OFD_SETLK; the last three count from the beginning of a slot's record. */
enum {
    SHMBU_OWNER_BYTE = 0,
    SHMBU_USERS_BYTE = 1,
    SHMBU_REAPER_BYTE = 2,
    SHMBU_SLOT_BYTE = 0,
    SHMBU_BORROWED_BYTE = 1,
    SHMBU_WORKING_BYTE = 2
};

/* TRITONSERVER_DataType of tritonserver.h */
enum shmbu_datatype {
    SHMBU_BOOL = 1,
    SHMBU_UINT8 = 2,
    SHMBU_UINT16 = 3,
    SHMBU_UINT32 = 4,
    SHMBU_UINT64 = 5,
    SHMBU_INT8 = 6,
    SHMBU_INT16 = 7,
    SHMBU_INT32 = 8,
    SHMBU_INT64 = 9,
    SHMBU_FP16 = 10,
    SHMBU_FP32 = 11,
    SHMBU_FP64 = 12,
    SHMBU_BYTES = 13,
    SHMBU_BF16 = 14
};

enum shmbu_region_kind { SHMBU_LENT = 1, SHMBU_CUDA = 2, SHMBU_NAMED = 3, SHMBU_CUDA_DESCRIPTOR = 4 };
enum shmbu_region_flags { SHMBU_FOR_ONE_REQUEST = 1 }; /* of CUDA memory by CUDA IPC */
enum shmbu_result_flags { SHMBU_IN_RESPONSE = 1 };
enum shmbu_answer_status { SHMBU_GIVEN = 0, SHMBU_NOT_GIVEN = 1 };

/* The first bytes of a region. The version is written last. */
struct shmbu_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t slot_count;
    uint64_t byte_size;
    uint8_t token[SHMBU_TOKEN_LENGTH];
    uint32_t record_byte_size;
    uint32_t reserved;
};
SHMBU_AT(shmbu_header, magic, 0);
SHMBU_AT(shmbu_header, version, 8);
SHMBU_AT(shmbu_header, slot_count, 12);
SHMBU_AT(shmbu_header, byte_size, 16);
SHMBU_AT(shmbu_header, token, 24);
SHMBU_AT(shmbu_header, record_byte_size, 40);
SHMBU_SIZE(shmbu_header, 48);

/* The first half of a slot's record: the client writes it, the generation last. Regions, inputs and outputs follow. In the
 * record of a place of a ring, the generation is the number of the frame that the client released last. */
struct shmbu_table {
    uint64_t generation;
    uint32_t length;
    uint16_t input_count;
    uint16_t output_count;
    uint16_t region_count;
    uint16_t frame_count;
    uint16_t frame_slot;
    uint16_t probe;
    uint64_t frame_stride;
};
SHMBU_AT(shmbu_table, generation, 0);
SHMBU_AT(shmbu_table, length, 8);
SHMBU_AT(shmbu_table, input_count, 12);
SHMBU_AT(shmbu_table, output_count, 14);
SHMBU_AT(shmbu_table, region_count, 16);
SHMBU_AT(shmbu_table, frame_count, 18);
SHMBU_AT(shmbu_table, frame_slot, 20);
SHMBU_AT(shmbu_table, probe, 22);
SHMBU_AT(shmbu_table, frame_stride, 24);
SHMBU_SIZE(shmbu_table, 32);

/* A further region. Its name follows, then zeros up to a multiple of 8. In CUDA memory, slot is 1 if the client waits for a
 * GPU that works after the answer, else 0. */
struct shmbu_region {
    uint8_t kind;
    uint8_t flags;
    uint16_t slot;
    uint16_t fence;
    uint16_t name_length;
    uint64_t byte_size;
    uint8_t secret[16];
};
SHMBU_AT(shmbu_region, kind, 0);
SHMBU_AT(shmbu_region, flags, 1);
SHMBU_AT(shmbu_region, slot, 2);
SHMBU_AT(shmbu_region, fence, 4);
SHMBU_AT(shmbu_region, name_length, 6);
SHMBU_AT(shmbu_region, byte_size, 8);
SHMBU_AT(shmbu_region, secret, 16);
SHMBU_SIZE(shmbu_region, 32);

/* An input or output, in tables and in results. Its shape follows, 8 bytes for each dimension; then its name; then
 * zeros up to a multiple of 8. */
struct shmbu_tensor {
    uint64_t offset;
    uint64_t byte_size;
    uint16_t region;
    uint8_t datatype;
    uint8_t rank;
    uint16_t name_length;
    uint16_t flags;
};
SHMBU_AT(shmbu_tensor, offset, 0);
SHMBU_AT(shmbu_tensor, byte_size, 8);
SHMBU_AT(shmbu_tensor, region, 16);
SHMBU_AT(shmbu_tensor, datatype, 18);
SHMBU_AT(shmbu_tensor, rank, 19);
SHMBU_AT(shmbu_tensor, name_length, 20);
SHMBU_AT(shmbu_tensor, flags, 22);
SHMBU_SIZE(shmbu_tensor, 24);

/* The second half of a slot's record: the model writes it, completed last. The outputs follow; then the events, each
 * the uint16_t number of a further region; then zeros up to a multiple of 8. With events, the model's GPU writes completed,
 * maybe after the answer; the client writes SHMBU_MAX_GENERATION there if the model died before. */
struct shmbu_results {
    uint64_t started;
    uint64_t completed;
    uint32_t length;
    uint16_t output_count;
    uint16_t event_count;
};
SHMBU_AT(shmbu_results, started, 0);
SHMBU_AT(shmbu_results, completed, 8);
SHMBU_AT(shmbu_results, length, 16);
SHMBU_AT(shmbu_results, output_count, 20);
SHMBU_AT(shmbu_results, event_count, 22);
SHMBU_SIZE(shmbu_results, 24);

/* A model's question at a sealed region's socket, an abstract Unix socket of type SOCK_SEQPACKET. The socket's address is a
 * zero byte, then the region's key up to and including the socket's digits. */
struct shmbu_question {
    uint8_t magic[8];
    uint32_t version;
    uint32_t reserved;
    uint64_t number;
    uint8_t token[SHMBU_TOKEN_LENGTH];
};
SHMBU_AT(shmbu_question, magic, 0);
SHMBU_AT(shmbu_question, version, 8);
SHMBU_AT(shmbu_question, reserved, 12);
SHMBU_AT(shmbu_question, number, 16);
SHMBU_AT(shmbu_question, token, 24);
SHMBU_SIZE(shmbu_question, 40);

/* The client's answer. With SHMBU_GIVEN comes a descriptor (SCM_RIGHTS), which has its own open file description. */
struct shmbu_answer {
    uint8_t magic[8];
    uint32_t status;
    uint32_t reserved;
};
SHMBU_AT(shmbu_answer, magic, 0);
SHMBU_AT(shmbu_answer, status, 8);
SHMBU_AT(shmbu_answer, reserved, 12);
SHMBU_SIZE(shmbu_answer, 16);

/* Offsets of a record, of its results and of the data, in bytes from the beginning of the region. */
static inline uint64_t shmbu_record_offset(uint32_t slot, uint32_t record_byte_size)
{
    return SHMBU_PAGE_SIZE + (uint64_t)slot * record_byte_size;
}

static inline uint64_t shmbu_results_offset(uint32_t slot, uint32_t record_byte_size)
{
    return shmbu_record_offset(slot, record_byte_size) + record_byte_size / 2;
}

static inline uint64_t shmbu_data_offset(uint32_t slot_count, uint32_t record_byte_size)
{
    return shmbu_record_offset(slot_count, record_byte_size);
}

/* The bytes that a name takes, including the zeros after it. */
static inline uint64_t shmbu_padded(uint64_t length)
{
    return (length + 7) & ~(uint64_t)7;
}

/* The number of a stream's response; the first one has index 0. */
static inline uint64_t shmbu_frame_number(uint64_t generation, uint32_t index)
{
    return (generation << 32) + index + 1;
}

#endif
