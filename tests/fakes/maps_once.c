/* A program that asks the kernel for memory by itself and then looks at its registers, as no C library lets it.
 *
 * It waits for a line, makes one anonymous mapping of so many bytes, writes to it and prints where it is; or says that
 * one of the call's arguments did not stay what it was. A test double for a program that changes calls in progress.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

int main(void)
{
    char line[32];
    if (!fgets(line, sizeof line, stdin))
        return 1;
    const long size = atol(line), protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(__x86_64__)
    register long result __asm__("rax") = SYS_mmap;
    register long a __asm__("rdi") = 0, b __asm__("rsi") = size, c __asm__("rdx") = protection;
    register long d __asm__("r10") = flags, e __asm__("r8") = -1, f __asm__("r9") = 0;
    __asm__ volatile("syscall"
                     : "+r"(result), "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f)
                     :
                     : "rcx", "r11", "memory");
    const int same = a == 0;
#elif defined(__aarch64__)
    register long number __asm__("x8") = SYS_mmap, result __asm__("x0") = 0;
    register long b __asm__("x1") = size, c __asm__("x2") = protection;
    register long d __asm__("x3") = flags, e __asm__("x4") = -1, f __asm__("x5") = 0;
    __asm__ volatile("svc #0"
                     : "+r"(result), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f)
                     : "r"(number)
                     : "memory");
    const int same = 1; /* the first argument's register is the result's */
#endif
    if (!same || b != size || c != protection || d != flags || e != -1 || f != 0) {
        puts("changed");
        return 1;
    }
    memset((void *)result, 'x', (size_t)size);
    printf("%ld\n", result);
    fflush(stdout);
    return fgets(line, sizeof line, stdin) ? 0 : 1; /* stays to be looked at */
}
