/* Counts what is left of imported memory: references to its handles, and its mappings, which outlive them. */
#include "imports.h"

#include <stdbool.h>

#include "blocks.h"
#include "driver.h"

#define EXPORT __attribute__((visibility("default")))

enum { MOST_IMPORTS = 1024 };

EXPORT CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *shared, int type);

static struct import {
    CUhandle handle;     /* 0: a mapping, or unused */
    uint32_t references; /* to the handle */
    CUdeviceptr address; /* of the mapping */
    size_t size;         /* of the mapping; 0: a handle, or unused */
} imports[MOST_IMPORTS];
static uint32_t used; /* entries */
static uint32_t lost; /* imports without an entry: their end goes unnoticed, so they count forever */

static bool is_used(const struct import *import)
{
    return import->references || import->size;
}

static struct import *find_handle(CUhandle handle)
{
    for (int i = 0; i < MOST_IMPORTS; i++)
        if (imports[i].references && imports[i].handle == handle)
            return &imports[i];
    return NULL;
}

static void add(struct import wanted)
{
    for (int i = 0; i < MOST_IMPORTS; i++)
        if (!is_used(&imports[i])) {
            imports[i] = wanted;
            used++;
            return;
        }
    lost++;
}

static void remove_import(struct import *import)
{
    *import = (struct import){0};
    used--;
}

static void add_reference(CUhandle handle)
{
    struct import *known = find_handle(handle);
    if (known)
        known->references++;
    else
        add((struct import){.handle = handle, .references = 1});
}

/* Lock, unless there are no imports, as in most programs, which must not wait. */
static bool begin(void)
{
    const struct control *control = blocks_control();
    if (!control || !atomic_load_explicit(&control->imports, memory_order_relaxed))
        return false;
    lock_blocks();
    return true;
}

static void end(void)
{
    struct control *control = blocks_control();
    if (control)
        atomic_store(&control->imports, used + lost);
    unlock_blocks();
}

EXPORT CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *shared, int type)
{
    CUresult result = driver()->import ? driver()->import(handle, shared, type) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && blocks_ready()) {
        lock_blocks();
        add_reference(*handle);
        end();
    }
    return result;
}

void note_mapped(CUhandle handle, CUdeviceptr address, size_t size)
{
    if (!begin())
        return;
    if (find_handle(handle))
        add((struct import){.address = address, .size = size});
    end();
}

void note_unmapped(CUdeviceptr address, size_t size)
{
    if (!begin())
        return;
    for (int i = 0; i < MOST_IMPORTS; i++)
        if (imports[i].size && imports[i].address >= address && imports[i].address - address < size)
            remove_import(&imports[i]);
    end();
}

void note_retained(CUhandle handle, CUdeviceptr address)
{
    if (!begin())
        return;
    for (int i = 0; i < MOST_IMPORTS; i++)
        if (imports[i].size && address >= imports[i].address && address - imports[i].address < imports[i].size) {
            add_reference(handle);
            break;
        }
    end();
}

void note_released(CUhandle handle)
{
    if (!begin())
        return;
    struct import *import = find_handle(handle);
    if (import && --import->references == 0)
        remove_import(import);
    end();
}
