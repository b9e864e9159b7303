/* Memory that another process has made and this one has imported. The driver checkpoints such a process, and does not
 * restore it; nothing that can be seen from outside shows it, so it is counted here. */
#ifndef KYBERNATE_PRELOAD_IMPORTS_H
#define KYBERNATE_PRELOAD_IMPORTS_H

#include "abi.h"

/* What the driver has done with one of its handles, or at addresses; what was not imported is ignored. */
void note_mapped(CUhandle handle, CUdeviceptr address, size_t size);
void note_unmapped(CUdeviceptr address, size_t size);
void note_retained(CUhandle handle, CUdeviceptr address);
void note_released(CUhandle handle);

#endif
