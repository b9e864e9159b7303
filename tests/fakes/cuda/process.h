/* The driver's state inside one program. A test double: see abi.h. */
#ifndef FAKE_CUDA_PROCESS_H
#define FAKE_CUDA_PROCESS_H

#include <pthread.h>
#include <stdatomic.h>

#include "gpus.h"

struct device {
    int place;   /* the GPU that this device is on now, counted over the machine */
    CUuuid uuid; /* what the program reads: the GPU's at cuInit, also after a move */
};

struct process {
    _Atomic int started;
    int count;
    struct device devices[MAX_GPUS]; /* those that CUDA_VISIBLE_DEVICES shows */
    int known_count;
    struct device known[MAX_GPUS]; /* the GPUs that it could open at cuInit: a GPU map must name each */
};

extern struct process process;

/* gate.c: allocate from the program's heap, as the driver does, whose lock another thread may have. */
void use_heap(void);

/* gate.c: pass the gate as the driver's function `name`: CUDA_SUCCESS, and leave() is owed; CUDA_ERROR_NOT_INITIALIZED,
 * or what the switches want. Blocks while locked. A thread that waits holds nothing, so that it can be stopped there. */
CUresult enter_function(const char *name);
#define enter() enter_function(__func__)
void leave(void);

/* Let no thread pass any more and wait until all have left; false, and open again, when that takes longer than that
 * (0: no limit). */
bool shut_gate(uint32_t timeout_ms);
void open_gate(void);

/* Tell whether this process can open a GPU; where there are no device nodes at all, it can open each. */
bool can_open(int gpu);

/* The device of this thread's current context, or -1. */
int current_device(void);

/* Start the thread that answers the verbs; returns when it can be asked. */
CUresult start_restorer(void);

/* holding.c: the process takes a place on the machine's GPUs, holding what CRIU refuses to dump; and leaves it. */
CUresult hold_gpus(void);
void release_gpus(void);
/* Look whether work is done, as calls do that take no lock for it; all is. */
CUresult read_semaphores(void);
CUresult charge_bytes(int device, uint64_t size);
void discharge_bytes(int device, uint64_t size);

/* devices.c: the device files that the program holds on top of that, where there are some. */
bool hold_devices(void);
void release_devices(void);

/* Charge the bytes of a restore; OUT_OF_MEMORY: a GPU has not enough free. */
CUresult charge_all(const struct machine *machine, const uint64_t bytes[MAX_GPUS]);

/* Map new memory of a GPU into this process, of zeros or with `content`, for which no page is cleared before; NULL: the
 * machine has not enough. */
char *map_on_gpu(uint64_t size, const char *content);

/* moving.c: move everything from the GPUs to ONE anonymous mapping, and release the GPUs. */
CUresult move_to_host(void);

/* Move it back. `moves[old gpu]` is the new one. OUT_OF_MEMORY: a GPU has not enough free; nothing has changed. */
CUresult move_to_gpus(const struct machine *machine, const int moves[MAX_GPUS]);

#endif
