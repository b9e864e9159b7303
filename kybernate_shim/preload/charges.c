/* Which memory of this process was counted, so that freed memory is no longer counted.
 *
 * What the program has allocated is counted, by whatever call: from the driver's own memory, from a pool, by handles,
 * as managed memory or arrays. What the driver takes for itself, such as contexts, is not.
 */
#include "charges.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "driver.h"
#include "ledger.h"
#include "owners.h"
#include "versions.h"

enum { FREE, MAPPING = BY_ARRAY + 1, REMOVED }; /* further kinds of an entry */
enum { FIRST_ROOM = 1024 };

struct known {
    uint64_t name, size, context; /* of a mapping, the last is the handle */
    uint32_t kind, references, mappings;
    CUdevice device;
};

static struct known *table;
static size_t room, used; /* entries; a power of two, and how many are not FREE */
static atomic_flag locked = ATOMIC_FLAG_INIT;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;

/* For a few instructions, and never across a call of the driver. */
static void lock(void)
{
    while (atomic_flag_test_and_set_explicit(&locked, memory_order_acquire))
        sched_yield();
}

static void unlock(void)
{
    atomic_flag_clear_explicit(&locked, memory_order_release);
}

static void in_child(void)
{
    table = NULL;
    room = used = 0;
    ledger_in_child();
    unlock();
}

static void prepare(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

static bool is_limited(void)
{
    if (!declared_bytes())
        return false;
    pthread_once(&prepared, prepare);
    return true;
}

static size_t start_of(uint32_t kind, uint64_t name)
{
    uint64_t mixed = (name ^ kind) * 0x9e3779b97f4a7c15;
    return (size_t)(mixed ^ mixed >> 32) & (room - 1);
}

static struct known *find(uint32_t kind, uint64_t name)
{
    if (!room)
        return NULL;
    for (size_t i = start_of(kind, name); table[i].kind != FREE; i = (i + 1) & (room - 1))
        if (table[i].kind == kind && table[i].name == name)
            return &table[i];
    return NULL;
}

static void put(struct known wanted)
{
    size_t i = start_of(wanted.kind, wanted.name);
    while (table[i].kind != FREE)
        i = (i + 1) & (room - 1);
    table[i] = wanted;
    used++;
}

static bool grow(void)
{
    struct known *old = table;
    size_t before = room, kept = 0;
    for (size_t i = 0; i < before; i++)
        kept += old[i].kind != FREE && old[i].kind != REMOVED;
    size_t wanted = !before ? FIRST_ROOM : kept * 2 >= before ? before * 2 : before;
    void *more = mmap(NULL, wanted * sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (more == MAP_FAILED)
        return false;
    table = more;
    room = wanted;
    used = 0;
    for (size_t i = 0; i < before; i++)
        if (old[i].kind != FREE && old[i].kind != REMOVED)
            put(old[i]);
    if (old)
        munmap(old, before * sizeof *old);
    return true;
}

/* Without room for an entry, the memory is counted until the process ends. */
static void add(struct known wanted)
{
    if ((used + 1) * 4 <= room * 3 || grow())
        put(wanted);
}

static void drop(struct known *it)
{
    ledger_remove(it->device, it->size);
    it->kind = REMOVED;
}

bool begin_charge_on(struct charge *charge, size_t size, CUdevice device)
{
    *charge = (struct charge){.size = size, .device = device};
    if (!is_limited() || device < 0 || device >= MOST_DEVICES)
        return true;
    charge->counted = ledger_add(device, size);
    return charge->counted;
}

bool begin_charge(struct charge *charge, size_t size)
{
    CUcontext context = NULL;
    CUdevice device = -1;
    *charge = (struct charge){.size = size};
    if (!is_limited() || !driver()->context || driver()->context(&context) || !context || driver()->device(&device))
        return true; /* the driver's answer says what is wrong */
    note_primary(context, device);
    bool fits = begin_charge_on(charge, size, device);
    charge->context = context;
    return fits;
}

CUresult end_charge(const struct charge *charge, CUresult result, enum charged by, uint64_t name)
{
    if (!charge->counted)
        return result;
    if (result) {
        ledger_remove(charge->device, charge->size);
        return result;
    }
    struct known made = {.name = name, .size = charge->size, .kind = by, .references = 1, .device = charge->device};
    made.context = (uint64_t)(uintptr_t)charge->context;
    lock();
    add(made);
    unlock();
    return result;
}

void refund(enum charged by, uint64_t name)
{
    if (!is_limited())
        return;
    lock();
    struct known *it = find(by, name);
    if (it)
        drop(it);
    unlock();
}

void refund_context(CUcontext context)
{
    if (!is_limited() || !context)
        return;
    lock();
    for (size_t i = 0; i < room; i++)
        if ((table[i].kind == AT_ADDRESS || table[i].kind == BY_ARRAY) && table[i].context == (uint64_t)(uintptr_t)context)
            drop(&table[i]);
    unlock();
}

static void drop_unused(struct known *it)
{
    if (!it->references && !it->mappings)
        drop(it);
}

void charge_mapped(CUhandle handle, CUdeviceptr address, size_t size)
{
    if (!is_limited())
        return;
    lock();
    struct known *it = find(BY_HANDLE, handle);
    if (it)
        it->mappings++;
    add((struct known){.name = address, .size = size, .context = handle, .kind = MAPPING});
    unlock();
}

static void unmap(struct known *mapping)
{
    struct known *it = find(BY_HANDLE, mapping->context);
    mapping->kind = REMOVED;
    if (it && it->mappings) {
        it->mappings--;
        drop_unused(it);
    }
}

void charge_unmapped(CUdeviceptr address, size_t size)
{
    if (!is_limited())
        return;
    lock();
    for (CUdeviceptr at = address; at < address + size;) {
        struct known *it = find(MAPPING, at);
        if (!it)
            break;
        at += it->size;
        unmap(it);
    }
    unlock();
}

void charge_retained(CUhandle handle, CUdeviceptr address)
{
    if (!is_limited())
        return;
    lock();
    struct known *mapping = find(MAPPING, address), *it = find(BY_HANDLE, mapping ? mapping->context : handle);
    if (it && it->name == handle)
        it->references++;
    unlock();
}

void charge_released(CUhandle handle)
{
    if (!is_limited())
        return;
    lock();
    struct known *it = find(BY_HANDLE, handle);
    if (it && it->references) {
        it->references--;
        drop_unused(it);
    }
    unlock();
}
