/* The pretended GPUs of a machine, and who holds how much of their memory.
 *
 * All of it lives in one directory, FAKE_CUDA_DIR or /run/fake-cuda, which containers share by a bind mount:
 *   gpus        one line per GPU: UUID, bytes, model
 *   driver      optional: API version and driver version, such as "13000 580.159.04"
 *   held/       one file per process that is on a GPU: a page with the bytes per GPU, then the memory itself.
 *               Its owner holds it by flock(2), so that the memory of a killed process is free immediately.
 *   lock        taken by flock(2) around every change of the accounts
 *   limits      one line for each limit of memory that NVML was given, which limits nothing here
 * and what switches.h adds.
 */
#ifndef FAKE_CUDA_GPUS_H
#define FAKE_CUDA_GPUS_H

#include <stdbool.h>

#include "abi.h"

enum { MAX_GPUS = 16, PAGE = 4096 };

struct gpu {
    CUuuid uuid;
    uint64_t bytes;
    char model[64];
};

struct machine {
    int count;
    struct gpu gpus[MAX_GPUS];
};

/* The first page of a file in held/. */
struct account {
    uint64_t magic;
    uint64_t bytes[MAX_GPUS];
};

/* Write `name` inside the state directory to `path`. */
void state_path(char *path, size_t size, const char *name);

/* Read at most `size` - 1 bytes of a file of the state directory; false when there is none. */
bool read_state(const char *name, char *text, size_t size);

/* Read the GPUs; false when the state directory names none. */
bool read_machine(struct machine *machine);

/* The API's version (13000 is 13.0) and the driver's ("580.159.04"). */
void read_driver(int *api, char *version, size_t size);

/* Open a new, flocked file in held/ with an empty account; -1 with errno set. `path` receives its name. */
int open_held(char *path, size_t size);

/* Add `bytes` per GPU to `mine`; false and no change when a GPU has not that much free. */
bool charge(const struct machine *machine, struct account *mine, const uint64_t bytes[MAX_GPUS]);
void discharge(struct account *mine, const uint64_t bytes[MAX_GPUS]);

/* Bytes in use on each GPU by all living processes. */
void used_bytes(uint64_t used[MAX_GPUS]);

#endif
