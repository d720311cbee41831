/* A driver of CUDA whose device memory is the host's, and the machine that cuFile wants to see.
 *
 * Loaded with LD_PRELOAD. Its SONAME is libcuda.so.1, so libcufile finds it instead of NVIDIA's. There is one device, and
 * all memory is its memory: copies to the device are memcpy. cuFile then runs all of its own code in compat mode.
 * Reads of /proc/modules and of udev's entries in /run/udev/data are redirected to files below the folder FAKE_MACHINE:
 * cuFile hangs without the first, and registers no file of a drive without an entry in the second.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uintptr_t address;

enum { DONE = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };

/* Contexts, streams and events are never looked into. */
static char handle;

int cuInit(unsigned flags) { (void)flags; return DONE; }
int cuDriverGetVersion(int *version) { *version = 13000; return DONE; }

int cuDeviceGetCount(int *count) { *count = 1; return DONE; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? INVALID_VALUE : DONE; }
int cuDeviceGetName(char *name, int size, int device) { (void)device; snprintf(name, size, "fake"); return DONE; }
int cuDeviceGetPCIBusId(char *bus, int size, int device) {
    (void)device;
    snprintf(bus, size, "0000:01:00.0");
    return DONE;
}
int cuDeviceGetUuid_v2(char uuid[16], int device) { (void)device; memset(uuid, 1, 16); return DONE; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 41: *value = 1; break; /* UNIFIED_ADDRESSING */
    case 75: *value = 9; break; /* COMPUTE_CAPABILITY_MAJOR */
    default: *value = 0;
    }
    return DONE;
}

static int give_handle(void **out) { *out = &handle; return DONE; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; return give_handle(context); }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { (void)flags, (void)device; return give_handle(context); }
int cuCtxGetCurrent(void **context) { return give_handle(context); }
int cuCtxPopCurrent_v2(void **context) { return context ? give_handle(context) : DONE; }
int cuCtxGetDevice(int *device) { *device = 0; return DONE; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return DONE; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; return give_handle(stream); }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    return give_handle(stream);
}
int cuEventCreate(void **event, unsigned flags) { (void)flags; return give_handle(event); }

static int allocate(void **out, size_t nbytes) { return posix_memalign(out, 65536, nbytes) ? OUT_OF_MEMORY : DONE; }
int cuMemAlloc_v2(void **out, size_t nbytes) { return allocate(out, nbytes); }
int cuMemAllocHost_v2(void **out, size_t nbytes) { return allocate(out, nbytes); }
int cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) { (void)flags; return allocate(out, nbytes); }
int cuMemAllocManaged(void **out, size_t nbytes, unsigned flags) { (void)flags; return allocate(out, nbytes); }
int cuMemFree_v2(void *memory) { free(memory); return DONE; }
int cuMemFreeHost(void *memory) { free(memory); return DONE; }
int cuMemHostGetDevicePointer_v2(address *out, void *memory, unsigned flags) {
    (void)flags;
    *out = (address)memory;
    return DONE;
}
int cuMemGetAddressRange_v2(address *base, size_t *nbytes, address memory) {
    if (base) *base = memory;
    if (nbytes) *nbytes = (size_t)1 << 28;
    return DONE;
}

static int attribute_of(void *out, int attribute, address memory) {
    switch (attribute) {
    case 1: *(void **)out = &handle; break;                        /* CONTEXT */
    case 2: *(unsigned *)out = 2; break;                           /* MEMORY_TYPE: the device's */
    case 3: case 4: *(address *)out = memory; break;               /* DEVICE_POINTER, HOST_POINTER */
    case 7: *(unsigned long long *)out = 1; break;                 /* BUFFER_ID */
    case 11: *(address *)out = memory & ~(address)0xfffffff; break; /* RANGE_START_ADDR */
    case 12: *(size_t *)out = (size_t)1 << 30; break;              /* RANGE_SIZE */
    case 13: *(int *)out = 1; break;                               /* MAPPED */
    default: *(unsigned *)out = 0;
    }
    return DONE;
}
int cuPointerGetAttribute(void *out, int attribute, address memory) { return attribute_of(out, attribute, memory); }
int cuPointerGetAttributes(unsigned count, int *attributes, void **out, address memory) {
    for (unsigned i = 0; i < count; i++) attribute_of(out[i], attributes[i], memory);
    return DONE;
}

#define COPY(name) \
    int name(void *to, const void *from, size_t nbytes) { memcpy(to, from, nbytes); return DONE; }
#define COPY_IN_ORDER(name) \
    int name(void *to, const void *from, size_t nbytes, void *stream) { \
        (void)stream; \
        memcpy(to, from, nbytes); \
        return DONE; \
    }
COPY(cuMemcpy) COPY(cuMemcpyHtoD_v2) COPY(cuMemcpyDtoH_v2)
COPY_IN_ORDER(cuMemcpyAsync) COPY_IN_ORDER(cuMemcpyHtoDAsync_v2) COPY_IN_ORDER(cuMemcpyDtoHAsync_v2)
int cuMemsetD8_v2(void *memory, unsigned char value, size_t nbytes) { memset(memory, value, nbytes); return DONE; }
int cuMemsetD8Async(void *memory, unsigned char value, size_t nbytes, void *stream) {
    (void)stream;
    return cuMemsetD8_v2(memory, value, nbytes);
}

int cuGetErrorName(int error, const char **name) { (void)error; *name = "error"; return DONE; }

/* libcufile looks these up when it opens the driver, and calls them for nothing that has an effect here. */
#define IDLE(name) int name(void) { return DONE; }
IDLE(cuCtxDestroy_v2) IDLE(cuCtxEnablePeerAccess) IDLE(cuCtxPushCurrent_v2) IDLE(cuCtxSetCurrent)
IDLE(cuDevicePrimaryCtxRelease_v2) IDLE(cuMemHostRegister_v2) IDLE(cuMemHostUnregister) IDLE(cuPointerSetAttribute)
IDLE(cuEventDestroy_v2) IDLE(cuEventElapsedTime) IDLE(cuEventQuery) IDLE(cuEventRecord) IDLE(cuEventSynchronize)
IDLE(cuStreamDestroy_v2) IDLE(cuStreamSynchronize) IDLE(cuStreamWaitEvent)

/* Nothing that cuFile does in compat mode needs these. */
#define MISSING(name) int name(void) { return NOT_SUPPORTED; }
MISSING(cuDeviceCanAccessPeer) MISSING(cuGetExportTable) MISSING(cuMemGetHandleForAddressRange)
MISSING(cuIpcCloseMemHandle) MISSING(cuIpcGetEventHandle) MISSING(cuIpcGetMemHandle) MISSING(cuIpcOpenEventHandle)
MISSING(cuIpcOpenMemHandle_v2) MISSING(cuLaunchHostFunc) MISSING(cuMemcpyPeer) MISSING(cuMemcpyPeerAsync)
MISSING(cuStreamWaitValue32) MISSING(cuStreamWaitValue32_v2) MISSING(cuStreamWriteValue32)
MISSING(cuStreamWriteValue32_v2)

/* The path that is opened in the place of another one. */
static const char *place_of(const char *path, char made[PATH_MAX]) {
    const char *machine = getenv("FAKE_MACHINE");
    if (!machine || !path || (strcmp(path, "/proc/modules") && strncmp(path, "/run/udev/data/b", 16))) return path;
    snprintf(made, PATH_MAX, "%s%s", machine, path);
    return made;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        char made[PATH_MAX]; \
        va_list rest; \
        va_start(rest, flags); \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest); \
        int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        return real(place_of(path, made), flags, mode); \
    }
#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        char made[PATH_MAX]; \
        FILE *(*real)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, #name); \
        return real(place_of(path, made), mode); \
    }
OPEN(open) OPEN(open64) FOPEN(fopen) FOPEN(fopen64)
