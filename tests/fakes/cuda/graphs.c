/* Graphs of copies and fills, which are done in the order in which they were added. A test double: see abi.h. */
#include <stdlib.h>
#include <string.h>

#include "copies.h"
#include "fills.h"

enum { MOST_NODES = 64 };

struct node {
    enum { COPY, FILL } kind;
    union {
        struct copy copy;
        struct fill fill;
    };
};

typedef struct graph {
    int count;
    struct node nodes[MOST_NODES];
} *CUgraph, *CUgraphExec;

typedef struct node *CUgraphNode;

/* CUDA_MEMSET_NODE_PARAMS. */
struct asked_fill {
    CUdeviceptr to;
    size_t pitch;
    unsigned value, bytes;
    size_t width, height;
};

static CUresult add(const char *name, CUgraphNode *node, CUgraph graph, const struct node *new)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    result = graph->count < MOST_NODES ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        *node = &graph->nodes[graph->count++];
        **node = *new;
    }
    leave();
    return result;
}

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    (void)flags;
    CUresult result = enter();
    if (result)
        return result;
    *graph = calloc(1, sizeof **graph);
    leave();
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                     const CUDA_MEMCPY3D *asked, CUcontext context)
{
    struct node new = {.kind = COPY};
    (void)after, (void)count, (void)context;
    if (!read_copy3d(asked, &new.copy))
        return CUDA_ERROR_NOT_SUPPORTED;
    return process.started && !copy_is_valid(&new.copy) ? CUDA_ERROR_INVALID_VALUE : add(__func__, node, graph, &new);
}

EXPORT CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                     const struct asked_fill *asked, CUcontext context)
{
    struct node new = {.kind = FILL};
    (void)after, (void)count, (void)context;
    new.fill = (struct fill){asked->to, asked->value, asked->bytes, asked->pitch, asked->width, asked->height};
    size_t size = asked->height ? (asked->height - 1) * asked->pitch + asked->width * asked->bytes : 0;
    if (process.started && !names_memory(asked->to, size, NULL))
        return CUDA_ERROR_INVALID_VALUE;
    return add(__func__, node, graph, &new);
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    CUresult result = cuGraphCreate(executable, 0);
    if (result == CUDA_SUCCESS)
        memcpy(*executable, graph, sizeof *graph);
    return result;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream)
{
    (void)stream;
    CUresult result = enter();
    if (result)
        return result;
    for (int i = 0; i < executable->count && !result; i++) {
        const struct node *node = &executable->nodes[i];
        result = node->kind == COPY ? do_copy(&node->copy) : do_fill(&node->fill);
    }
    leave();
    return result ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    CUresult result = enter();
    if (result)
        return result;
    free(graph);
    leave();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec executable)
{
    return cuGraphDestroy(executable);
}
