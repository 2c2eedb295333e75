/*
 * A client of protocol 2 in C, written from docs/protocol.md alone: shared memory, and HTTP over a plain socket.
 *
 * usage: client HOST PORT system | sealed identity | batch | strings | stale | refused | takeback
 *
 * Makes a region, a file in /dev/shm or sealed memory, calls a model on it, checks what came of it, and removes the
 * region. Prints "ok", or what is wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "desk.h"
#include "shm_protocol.h"

#define DATA_SIZE 65536
#define RECORD_SIZE SHMBU_PAGE_SIZE
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define STAMP(word) __atomic_load_n(&slot->results->word, __ATOMIC_ACQUIRE)
#define CHECK(holds) ((holds) ? (void)0 : fail(__LINE__, #holds))

static const char *host, *port;
static int is_sealed;
static char path[64 + SHMBU_MAX_KEY_LENGTH]; /* of the region's file, if it is one */

static void fail(int line, const char *what)
{
    fprintf(stderr, "client.c:%d: %s (%s)\n", line, what, strerror(errno));
    if (*path)
        unlink(path);
    exit(1);
}

/* A region with one slot, and the table that is being written to it. */
struct slot {
    int fd, desk; /* the desk is the socket where models fetch the region, if it is sealed, else -1 */
    uint8_t *base;
    char key[SHMBU_MAX_KEY_LENGTH + 1];
    char token[2 * SHMBU_TOKEN_LENGTH + 1];
    struct shmbu_table *table;
    struct shmbu_results *results;
    uint8_t *end_of_table;
    uint64_t generation, free_offset;
};

static int lock(int fd, short type, off_t start, off_t length)
{
    struct flock bytes = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    return fcntl(fd, F_OFD_SETLK, &bytes);
}

/* Nobody finds it any more, and the models that have it see that. Twice is fine. */
static void remove_region(struct slot *slot)
{
    if (*path)
        CHECK(unlink(path) == 0);
    if (slot->desk >= 0)
        CHECK(close(slot->desk) == 0 && lock(slot->fd, F_UNLCK, SHMBU_OWNER_BYTE, 1) == 0);
    *path = 0, slot->desk = -1;
}

static struct slot make_region(void)
{
    struct slot slot = {.desk = -1};
    uint64_t size = shmbu_data_offset(1, RECORD_SIZE) + DATA_SIZE;
    struct shmbu_header header = {.slot_count = 1, .byte_size = size, .record_byte_size = RECORD_SIZE};
    char own[32];
    CHECK(getrandom(header.token, sizeof header.token, 0) == sizeof header.token);
    write_hex(slot.token, header.token, sizeof header.token);
    memcpy(header.magic, SHMBU_MAGIC, sizeof header.magic);

    slot.fd = is_sealed ? memfd_create("region", MFD_CLOEXEC | MFD_ALLOW_SEALING)
                        : open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    CHECK(slot.fd >= 0 && fchmod(slot.fd, 0600) == 0);
    CHECK(posix_fallocate(slot.fd, 0, (off_t)size) == 0);
    CHECK(!is_sealed || fcntl(slot.fd, F_ADD_SEALS, SEALS) == 0);
    CHECK(lock(slot.fd, F_WRLCK, SHMBU_OWNER_BYTE, 1) == 0);
    slot.base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, slot.fd, 0);
    CHECK(slot.base != MAP_FAILED);
    memcpy(slot.base, &header, sizeof header);
    __atomic_store_n(&((struct shmbu_header *)slot.base)->version, SHMBU_VERSION, __ATOMIC_RELEASE);
    if (is_sealed) {
        CHECK((slot.desk = open_desk(slot.key)) >= 0);
    } else {
        sprintf(slot.key, "%s%d-%.16s", SHMBU_KEY_PREFIX, (int)getpid(), slot.token + 16);
        sprintf(path, "/dev/shm/%s", slot.key);
        sprintf(own, "/proc/self/fd/%d", slot.fd);
        CHECK(linkat(AT_FDCWD, own, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0);
    }
    slot.table = (struct shmbu_table *)(slot.base + shmbu_record_offset(0, RECORD_SIZE));
    slot.results = (struct shmbu_results *)(slot.base + shmbu_results_offset(0, RECORD_SIZE));
    return slot;
}

/* Write a table: inputs first, then outputs. end_table() makes it that of the slot's next request. */
static void begin_table(struct slot *slot)
{
    memset((uint8_t *)slot->table + 8, 0, sizeof *slot->table - 8);
    slot->end_of_table = (uint8_t *)(slot->table + 1);
    slot->free_offset = shmbu_data_offset(1, RECORD_SIZE);
}

static void *add(struct slot *slot, const char *name, uint8_t type, uint8_t rank, const uint64_t *shape, uint64_t size)
{
    struct shmbu_tensor tensor = {
        .offset = slot->free_offset, .byte_size = size, .datatype = type, .rank = rank, .name_length = strlen(name)};
    uint8_t *at = slot->end_of_table;
    memcpy(at, &tensor, sizeof tensor);
    memcpy(at += sizeof tensor, shape, 8 * rank);
    memset(at += 8 * rank, 0, shmbu_padded(tensor.name_length));
    memcpy(at, name, tensor.name_length);
    slot->end_of_table = at + shmbu_padded(tensor.name_length);
    slot->free_offset += (size + 255) & ~(uint64_t)255;
    *(type ? &slot->table->input_count : &slot->table->output_count) += 1;
    return slot->base + tensor.offset;
}

static void end_table(struct slot *slot)
{
    slot->table->length = slot->end_of_table - (uint8_t *)slot->table;
    __atomic_store_n(&slot->table->generation, ++slot->generation, __ATOMIC_RELEASE);
}

/* Send a request and return the status of its answer; 0 if there is none in time. Meanwhile, hand the region over. */
static char answer[16384];

static int infer(struct slot *slot, const char *model, const char *inputs, uint64_t generation, int timeout_ms)
{
    char body[1024], *end;
    struct addrinfo *found, wanted = {.ai_socktype = SOCK_STREAM};
    ssize_t got = -1, length = 0;
    int status = 0, ready;
    CHECK(getaddrinfo(host, port, &wanted, &found) == 0);
    int fd = socket(found->ai_family, SOCK_STREAM, 0);
    CHECK(fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0);
    freeaddrinfo(found);
    int size = sprintf(body, "{\"inputs\":[%s],\"parameters\":{\"%s\":\"%d/%s/%s/%s/0\",\"%s\":%" PRIu64 "}}", inputs,
        SHMBU_SLOT_PARAMETER, SHMBU_VERSION, model, slot->key, slot->token, SHMBU_GENERATION_PARAMETER, generation);
    CHECK(dprintf(fd, "POST /v2/models/%s/infer HTTP/1.1\r\nHost: %s:%s\r\nContent-Type: application/json\r\n"
                      "Content-Length: %d\r\nConnection: close\r\n\r\n%s", model, host, port, size, body) > 0);
    struct pollfd heard[] = {{fd, POLLIN, 0}, {slot->desk, POLLIN, 0}}; /* no desk, -1, is never heard */
    while (got != 0 && (ready = poll(heard, 2, timeout_ms)) > 0) {
        if (heard[1].revents)
            CHECK(hand_over(slot->desk, slot->fd, ((struct shmbu_header *)slot->base)->token) == 0);
        if (heard[0].revents) {
            CHECK((got = recv(fd, answer + length, sizeof answer - 1 - length, 0)) >= 0);
            length += got;
        }
    }
    answer[length] = 0;
    CHECK(got == 0 || ready == 0); /* the server closes the connection, or does not answer in time */
    close(fd);
    if (got == 0 && sscanf(answer, "HTTP/1.1 %d", &status) == 1 && (end = strstr(answer, "\r\n\r\n")) != NULL)
        memmove(answer, end + 4, strlen(end + 4) + 1);
    return status;
}

static int is_refused_as(const char *code)
{
    return strncmp(answer, "{\"error\":\"", 10) == 0 && strncmp(answer + 10, code, strlen(code)) == 0;
}

/* Return an output of the results, whose shape follows the tensor; all of them lie in the slot's region here. */
static const struct shmbu_tensor *output(const struct slot *slot, const char *name)
{
    const uint8_t *at = (const uint8_t *)(slot->results + 1);
    CHECK(STAMP(completed) == slot->generation);
    for (int i = 0; i < slot->results->output_count; i++) {
        const struct shmbu_tensor *tensor = (const struct shmbu_tensor *)at;
        at += sizeof *tensor + 8 * tensor->rank;
        if (tensor->name_length == strlen(name) && memcmp(at, name, tensor->name_length) == 0) {
            CHECK(tensor->region == 0 && tensor->flags == 0);
            return tensor;
        }
        at += shmbu_padded(tensor->name_length);
    }
    fail(__LINE__, name);
    return NULL;
}

static int take_back(struct slot *slot)
{
    if (lock(slot->fd, F_WRLCK, (off_t)shmbu_record_offset(0, RECORD_SIZE), 2) != 0)
        return 0;
    __atomic_store_n(&slot->table->generation, ++slot->generation, __ATOMIC_RELEASE);
    CHECK(lock(slot->fd, F_UNLCK, (off_t)shmbu_record_offset(0, RECORD_SIZE), 2) == 0);
    return 1;
}

static void call_identity(struct slot *slot, uint64_t length)
{
    begin_table(slot);
    float *in = add(slot, "INPUT0", SHMBU_FP32, 1, &length, 4 * length);
    float *out = add(slot, "OUTPUT0", 0, 0, NULL, 4 * length);
    for (uint64_t i = 0; i < length; i++)
        in[i] = (float)i, out[i] = -1;
    end_table(slot);
    CHECK(infer(slot, "identity", "", slot->generation, 30000) == 200);
    const struct shmbu_tensor *found = output(slot, "OUTPUT0");
    CHECK(found->datatype == SHMBU_FP32 && found->rank == 1 && *(const uint64_t *)(found + 1) == length);
    CHECK(found->byte_size == 4 * length && memcmp(slot->base + found->offset, in, 4 * length) == 0);
}

static void batch(struct slot *slot)
{
#define ROWS(count) "{\"name\":\"" SHMBU_BATCH_INPUT "\",\"shape\":[" count ",0],\"datatype\":\"UINT8\",\"data\":[]}"
    const uint64_t shape[] = {3, 4};
    begin_table(slot);
    float *in = add(slot, "X", SHMBU_FP32, 2, shape, 48), *out = add(slot, "Y", 0, 0, NULL, 48);
    int32_t *count = add(slot, "REQUEST_COUNT", 0, 0, NULL, 12);
    for (int i = 0; i < 12; i++)
        in[i] = (float)i;
    end_table(slot);
    CHECK(infer(slot, "batch_witness", ROWS("3"), slot->generation, 30000) == 200);
    CHECK(output(slot, "Y")->byte_size == 48 && output(slot, "REQUEST_COUNT")->datatype == SHMBU_INT32);
    for (int i = 0; i < 12; i++)
        CHECK(out[i] == (float)i + 1 && count[i / 4] == 1);
    end_table(slot);
    CHECK(infer(slot, "batch_witness", ROWS("2"), slot->generation, 30000) == 400 && is_refused_as("shm:tensor"));
}

static void strings(struct slot *slot)
{
    static const char sent[] = "\3\0\0\0cat\0\0\0\0\4\0\0\0bird", expected[] = "\3\0\0\0CAT\0\0\0\0\4\0\0\0BIRD";
    const uint64_t count = 3;
    begin_table(slot);
    memcpy(add(slot, "TEXT", SHMBU_BYTES, 1, &count, sizeof sent - 1), sent, sizeof sent - 1);
    add(slot, "UPPER", 0, 0, NULL, 256);
    end_table(slot);
    CHECK(infer(slot, "text_upper", "", slot->generation, 30000) == 200);
    const struct shmbu_tensor *found = output(slot, "UPPER");
    CHECK(found->datatype == SHMBU_BYTES && *(const uint64_t *)(found + 1) == count);
    CHECK(found->byte_size == sizeof expected - 1);
    CHECK(memcmp(slot->base + found->offset, expected, sizeof expected - 1) == 0);
}

static void stale(struct slot *slot)
{
    /* Can the model open the region? Nothing was begun in the slot, so that whoever has opened it finds this stale. */
    CHECK(infer(slot, "identity", "", 1, 30000) == 400 && is_refused_as("shm:stale") && STAMP(started) == 0);
    call_identity(slot, 5);
    uint64_t before = slot->generation;
    end_table(slot);
    memset(slot->base + shmbu_data_offset(1, RECORD_SIZE), 7, DATA_SIZE);
    CHECK(infer(slot, "identity", "", before, 30000) == 400 && is_refused_as("shm:stale"));
    for (int i = 0; i < DATA_SIZE; i++)
        CHECK(slot->base[shmbu_data_offset(1, RECORD_SIZE) + i] == 7);
    CHECK(STAMP(started) == before && STAMP(completed) == before);
    CHECK(infer(slot, "identity", "", slot->generation, 30000) == 200 && STAMP(completed) == slot->generation);
    CHECK(infer(slot, "identity", "", slot->generation, 30000) == 400 && is_refused_as("shm:replayed"));
    CHECK(infer(slot, "identity", "", 0, 30000) == 400 && is_refused_as("shm:table"));
}

static void refused(struct slot *slot)
{
    call_identity(slot, 5);
    char digit = slot->token[31];
    slot->token[31] = digit == '0' ? '1' : '0';
    end_table(slot);
    int status = infer(slot, "identity", "", slot->generation, 30000);
    CHECK(is_sealed ? status == 404 && is_refused_as("shm:gone") : status == 400 && is_refused_as("shm:refused"));
    CHECK(strstr(answer, slot->token) == NULL && strstr(answer, slot->key) == NULL);
    CHECK(STAMP(started) != slot->generation && take_back(slot));
    slot->token[31] = digit;
    call_identity(slot, 6);
    remove_region(slot);
    CHECK(infer(slot, "identity", "", slot->generation + 1, 30000) == 404 && is_refused_as("shm:gone"));
}

static void takeback(struct slot *slot)
{
    const uint64_t two = 2;
    begin_table(slot);
    volatile int64_t *question = add(slot, "QUESTION", SHMBU_INT64, 1, &two, 16);
    volatile int64_t *reply = add(slot, "ANSWER", 0, 0, NULL, 16);
    question[0] = 41, question[1] = 0, reply[0] = 0;
    end_table(slot);
    CHECK(infer(slot, "handshake", "", slot->generation, 500) == 0); /* the model waits for the other question */
    for (int i = 0; i < 1000 && reply[0] != 42; i++)
        usleep(10000);
    CHECK(STAMP(started) == slot->generation && STAMP(completed) != slot->generation);
    CHECK(!take_back(slot));
    uint64_t late = slot->generation;
    question[1] = 8; /* the model comes to its end, although nobody waits for the answer */
    for (int i = 0; i < 1000 && !take_back(slot); i++)
        usleep(10000);
    CHECK(STAMP(completed) == late && slot->generation == late + 1 && reply[1] == 9);
    reply[0] = reply[1] = -1;
    CHECK(infer(slot, "handshake", "", late, 30000) == 400 && is_refused_as("shm:stale"));
    CHECK(reply[0] == -1 && reply[1] == -1);
    call_identity(slot, 7);
}

static void identity(struct slot *slot)
{
    for (uint64_t length = 0; length < 2000; length = 2 * length + 3)
        call_identity(slot, length);
}

int main(int count, char **words)
{
    static const struct { const char *name; void (*run)(struct slot *); } commands[] = {{"identity", identity},
        {"batch", batch}, {"strings", strings}, {"stale", stale}, {"refused", refused}, {"takeback", takeback}};
    is_sealed = count == 5 && strcmp(words[3], "sealed") == 0;
    int is_known = is_sealed || (count == 5 && strcmp(words[3], "system") == 0);
    for (size_t i = 0; is_known && i < sizeof commands / sizeof *commands; i++)
        if (strcmp(words[4], commands[i].name) == 0) {
            host = words[1], port = words[2];
            struct slot slot = make_region();
            commands[i].run(&slot);
            remove_region(&slot);
            return puts("ok") < 0;
        }
    fprintf(stderr, "usage: client HOST PORT system | sealed identity | batch | strings | stale | refused | takeback\n");
    return 2;
}
