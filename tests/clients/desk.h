/* The socket where models fetch a client's sealed region; see docs/protocol.md. */
#ifndef DESK_H
#define DESK_H

#include <stdint.h>

/* Open the socket of a region, and write the region's key, of SHMBU_MAX_KEY_LENGTH and a zero at most. -1 on failure. */
int open_desk(char *key);

/* Answer one model, which has connected: the region is its, if it knows the token. Return 0, or -1 on failure. */
int hand_over(int desk, int region, const uint8_t *token);

/* Write bytes as hexadecimal digits, and a zero. */
void write_hex(char *text, const uint8_t *bytes, int count);

#endif
