/* The socket where models fetch a client's sealed region. It hands out one region; so every desk's number is 1. */
#define _GNU_SOURCE
#include "desk.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm_protocol.h"

enum { NUMBER = 1, SILENCE_MS = 1000 /* so long may a model that has connected say nothing */ };

void write_hex(char *text, const uint8_t *bytes, int count)
{
    for (int i = 0; i < count; i++)
        sprintf(text + 2 * i, "%02x", bytes[i]);
}

int open_desk(char *key)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX}; /* an abstract address begins with a zero byte */
    uint8_t random[SHMBU_SOCKET_LENGTH / 2];
    char digits[SHMBU_SOCKET_LENGTH + 1];
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return -1;
    write_hex(digits, random, sizeof random);
    sprintf(key, "%s%s-%d", SHMBU_SEALED_KEY_PREFIX, digits, NUMBER);
    int length = sprintf(address.sun_path + 1, "%s%s", SHMBU_SEALED_KEY_PREFIX, digits);
    socklen_t size = offsetof(struct sockaddr_un, sun_path) + 1 + length;
    int desk = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (desk >= 0 && (bind(desk, (struct sockaddr *)&address, size) != 0 || listen(desk, 16) != 0)) {
        close(desk);
        return -1;
    }
    return desk;
}

/* Return whether a model asks for the region, and may have it; who says nothing is not waited for. */
static int has_asked(int connection, const uint8_t *token)
{
    struct shmbu_question question;
    struct pollfd asked = {connection, POLLIN, 0};
    return poll(&asked, 1, SILENCE_MS) == 1
        && recv(connection, &question, sizeof question, MSG_DONTWAIT | MSG_TRUNC) == sizeof question
        && memcmp(question.magic, SHMBU_HANDOVER_MAGIC, sizeof question.magic) == 0
        && question.version == SHMBU_VERSION && question.reserved == 0 && question.number == NUMBER
        && memcmp(question.token, token, sizeof question.token) == 0;
}

static void answer(int connection, const int *descriptor)
{
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof *descriptor)]; } control = {{0}};
    struct shmbu_answer reply = {.status = descriptor ? SHMBU_GIVEN : SHMBU_NOT_GIVEN};
    struct iovec bytes = {&reply, sizeof reply};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    memcpy(reply.magic, SHMBU_HANDOVER_MAGIC, sizeof reply.magic);
    if (descriptor) {
        control.header = (struct cmsghdr){CMSG_LEN(sizeof *descriptor), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.header), descriptor, sizeof *descriptor);
        message.msg_control = control.room, message.msg_controllen = sizeof control.room;
    }
    sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT); /* whether it still waits for that is the model's affair */
}

int hand_over(int desk, int region, const uint8_t *token)
{
    char own[32];
    struct ucred peer;
    socklen_t size = sizeof peer;
    int copy = -1, connection = accept4(desk, NULL, NULL, SOCK_CLOEXEC);
    if (connection < 0)
        return -1;
    int failed = getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0;
    if (!failed && (peer.uid == geteuid() || peer.uid == 0)) {
        if (has_asked(connection, token)) {
            sprintf(own, "/proc/self/fd/%d", region); /* opened anew: locks belong to open file descriptions */
            copy = open(own, O_RDWR | O_CLOEXEC);
            failed = copy < 0;
        }
        answer(connection, copy < 0 ? NULL : &copy);
    }
    if (copy >= 0)
        close(copy);
    close(connection);
    return failed ? -1 : 0;
}
