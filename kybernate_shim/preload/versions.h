/* Binds to the oldest glibc of each architecture: the library runs in whatever image a container brings.
 *
 * Newer ones have moved these from libdl and libpthread into libc, under a new version; the old one stays forever.
 */
#ifndef KYBERNATE_PRELOAD_VERSIONS_H
#define KYBERNATE_PRELOAD_VERSIONS_H

#if defined(__x86_64__)
#define OLDEST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST_GLIBC "GLIBC_2.17"
#else
#error "CUDA checkpoints exist on x86-64 and arm64 only"
#endif

#define OLDEST(name) __asm__(".symver " #name "," #name "@" OLDEST_GLIBC)
OLDEST(dlopen);
OLDEST(dlvsym);
OLDEST(pthread_create);
OLDEST(pthread_detach);
OLDEST(pthread_once);

#endif
