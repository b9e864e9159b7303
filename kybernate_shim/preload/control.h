/* What the library and the node's CUDA helper share: one mapping, found by its name in the process's maps.
 *
 * The mapping is a memfd whose descriptor the library closes: it belongs to no path, no descriptor and no namespace of
 * the container, and CRIU carries it along as the memory that it is. The helper opens it through /proc/PID/map_files,
 * asks by raising `asked` and waking it as a futex(2), and waits until `answered` has caught up. The layout is read by
 * kybernate_shim/arena/control.py; a change of it is a new VERSION, but for words that were
 * unused before, which may be 0 then.
 */
#ifndef KYBERNATE_PRELOAD_CONTROL_H
#define KYBERNATE_PRELOAD_CONTROL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define CONTROL_NAME "kybernate-arena" /* of the memfd, and of the thread that answers */

enum { CONTROL_MAGIC = 0x4b594241, CONTROL_VERSION = 1, MAX_BLOCKS = 1 << 16 };

/* What can be asked. Each answers 0, the driver's error, or a negative errno. */
enum verb {
    PROBE,    /* nothing: does the thread answer, and get the locks of the heap? */
    SHARE,    /* open a descriptor for each block of the range that can be taken */
    CLOSE,    /* close every descriptor that SHARE and REBUILD have opened */
    RELEASE,  /* give up the memory of all shared blocks: their bytes are elsewhere now */
    FORGET,   /* unmark all shared blocks: they stay */
    REBUILD,  /* make new memory for the released blocks of the range, at their addresses, and share it */
    COMMIT,   /* the bytes are back in everything that was rebuilt */
    DISCARD,  /* give up again what was rebuilt */
    LET_GO,   /* do as RELEASE with the shared blocks of the range */
    SHUT,     /* no thread begins with a block until the next SHARE, or for a second; EBUSY while one is at it */
};

enum block_state {
    UNUSED,
    BUSY,     /* in the hands of a thread of the program */
    HERE,     /* its bytes are in VRAM */
    SHARED,   /* the same, and the helper has been handed it */
    AWAY,     /* its bytes are in the arena; of VRAM, it has placeholders at its addresses */
    REBUILT,  /* it has VRAM again, which the bytes are on their way to */
};

enum {
    BY_PROGRAM = 1, /* made by the program's own cuMemCreate */
    PRIVATE = 2,    /* not to be taken: it is exported, mapped in parts, or read-only somewhere */
    SHAREABLE = 4,  /* the program itself wanted it to be exportable */
    PASSING = 8,    /* BUSY in a call on a range of addresses */
    COVERED = 16,   /* placeholders are mapped at its addresses */
};

struct block {
    uint64_t address; /* 0: mapped nowhere */
    uint64_t size;
    uint64_t handle;  /* the driver's */
    uint64_t context; /* whose end is the block's; 0 of the program's own */
    uint32_t state;
    uint32_t flags;
    int32_t device;
    int32_t fd;          /* -1: none */
    uint32_t references; /* of the program to its own memory */
    uint32_t generation;
    uint64_t devices; /* bit mask of those that may read and write it */
    uint8_t compression, rdma, padding[6];
};

struct control {
    uint32_t magic, version;
    int32_t pid, tid; /* as the container sees them */
    _Atomic uint32_t asked, answered;
    uint32_t verb;
    int32_t result;
    uint32_t first, count; /* the range of blocks of SHARE, REBUILD and LET_GO */
    _Atomic uint32_t used; /* entries of the table that were ever used */
    _Atomic uint32_t imports; /* how much memory of other processes is imported; 0 from older libraries */
    _Atomic uint32_t watched; /* set by the node: note the next call that counts as use; cleared by that call */
    _Atomic uint32_t uses;    /* how many were noted */
    uint8_t rest[4096 - 56];
    struct block blocks[MAX_BLOCKS];
};

_Static_assert(sizeof(struct block) == 72, "control.py reads this layout");
_Static_assert(offsetof(struct control, blocks) == 4096, "control.py reads this layout");

#endif
