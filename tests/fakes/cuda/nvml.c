/* A pretended libnvidia-ml.so.1: what can be asked of a card without a CUDA context. A test double: see abi.h. */
#include <stdio.h>
#include <string.h>

#include "cards.h"

enum { NVML_SUCCESS = 0, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_NOT_FOUND = 6 };
enum { NVML_ERROR_DRIVER_NOT_LOADED = 9 };

struct memory {
    unsigned long long total, free, used;
};

/* A handle is the card's index plus one: opaque, and never NULL. */
typedef uintptr_t handle;

static int card_at(handle device, struct card *card)
{
    struct machine machine;
    if (!read_machine(&machine) || device < 1 || device > (handle)machine.count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = machine.cards[device - 1];
    return NVML_SUCCESS;
}

EXPORT int nvmlInit_v2(void)
{
    struct machine machine;
    return read_machine(&machine) ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

EXPORT int nvmlShutdown(void)
{
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    int api;
    read_driver(&api, version, size);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned int *count)
{
    struct machine machine;
    *count = read_machine(&machine) ? (unsigned int)machine.count : 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, handle *device)
{
    struct card card;
    *device = index + 1;
    return card_at(*device, &card);
}

static void format_uuid(const CUuuid *uuid, char *text, size_t size)
{
    size_t at = (size_t)snprintf(text, size, "GPU-");
    for (int i = 0; i < 16 && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                               uuid->bytes[i]);
}

EXPORT int nvmlDeviceGetUUID(handle device, char *uuid, unsigned int size)
{
    struct card card;
    int result = card_at(device, &card);
    if (result == NVML_SUCCESS)
        format_uuid(&card.uuid, uuid, size);
    return result;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, handle *device)
{
    char text[64];
    struct card card;
    for (*device = 1; card_at(*device, &card) == NVML_SUCCESS; ++*device) {
        format_uuid(&card.uuid, text, sizeof text);
        if (strcmp(text, uuid) == 0)
            return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT int nvmlDeviceGetName(handle device, char *name, unsigned int size)
{
    struct card card;
    int result = card_at(device, &card);
    if (result == NVML_SUCCESS)
        snprintf(name, size, "%s", card.model);
    return result;
}

EXPORT int nvmlDeviceGetMemoryInfo(handle device, struct memory *memory)
{
    struct card card;
    uint64_t used[MAX_CARDS];
    int result = card_at(device, &card);
    if (result == NVML_SUCCESS) {
        used_bytes(used);
        *memory = (struct memory){card.bytes, card.bytes - used[device - 1], used[device - 1]};
    }
    return result;
}

/* The state directory's file `mig` switches the mode on for every card, as a pre-flight check has to refuse it. */
EXPORT int nvmlDeviceGetMigMode(handle device, unsigned int *current, unsigned int *pending)
{
    char text[8];
    struct card card;
    *current = *pending = read_state("mig", text, sizeof text) && text[0] == '1';
    return card_at(device, &card);
}

EXPORT int nvmlDeviceGetPersistenceMode(handle device, unsigned int *mode)
{
    struct card card;
    *mode = 1;
    return card_at(device, &card);
}

EXPORT const char *nvmlErrorString(int result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    default:
        return "Unknown Error";
    }
}
