/* A program whose code another process rewrites while a tracer makes calls in it.
 *
 * Two processes share a page: one may only execute it, the other may only write it, and does so in a loop. At its
 * beginning the page holds, in alternation a plain system call instruction and something else, which argv[1] names. The
 * first process has no other system call instruction in front of that page and no vDSO. Its seccomp filter forbids
 * mkdir: by an error, or with argv[3], of whatever is not on its list by the end of the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, BODY = 64, PATH = 2048 };
static unsigned char *const CODE = (unsigned char *)0x10000; /* the lowest address: found first */

static void put(unsigned char **at, const void *bytes, size_t count)
{
    memcpy(*at, bytes, count);
    *at += count;
}

static void put_number(unsigned char **at, unsigned char opcode, uint32_t value)
{
    put(at, &opcode, 1);
    put(at, &value, 4);
}

/* Write what the page does in place of the call that it seems to make. */
static void write_body(unsigned char *page, const char *what, const char *path)
{
    unsigned char *at = page + BODY;
    strcpy((char *)page + PATH, path);
    if (!strcmp(what, "mkdir") || !strcmp(what, "mkdir32")) {
        const int narrow = !strcmp(what, "mkdir32");
        put_number(&at, 0xb8, narrow ? 39 : SYS_mkdir);            /* mov eax, number */
        put_number(&at, narrow ? 0xbb : 0xbf, 0x10000 + PATH);     /* mov ebx or edi, path */
        put_number(&at, narrow ? 0xb9 : 0xbe, 0700);               /* mov ecx or esi, mode */
        put(&at, narrow ? "\xcd\x80" : "\x0f\x05", 2);             /* int 0x80 or syscall */
    } else if (!strcmp(what, "arguments")) {
        put(&at, "\x48\x31\xf6\x0f\x05", 5);                       /* xor rsi, rsi; syscall */
    } else if (!strcmp(what, "place")) {
        put(&at, "\x0f\x05", 2);
    } else if (!strcmp(what, "fault")) {
        put(&at, "\x0f\x0b", 2);                                   /* ud2 */
    }
    put(&at, "\xeb\xfe", 2);                                       /* a jump to itself */
}

static int forbid_mkdir(int strictly)
{
    struct sock_filter lenient[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 2),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mkdir, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_filter strict[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 7),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_read, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_restart_syscall, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mkdir, 2, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = {strictly ? sizeof strict / sizeof *strict : sizeof lenient / sizeof *lenient,
                                 strictly ? strict : lenient};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static void rewrite_for_ever(volatile unsigned char *page)
{
    volatile uint16_t *first = (volatile uint16_t *)page;
    for (unsigned turn = 0;; turn++) {
        *first = turn & 1 ? 0x050f : (BODY - 2) << 8 | 0xeb; /* syscall, or a jump to the body */
        for (unsigned wait = 0; wait < turn * 7919 % 397; wait++)
            __asm__ volatile("pause");
    }
}

static void *vdso_end(char *vdso)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned long start, end;
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && (char *)start == vdso) {
            fclose(maps);
            return (char *)end;
        }
    return vdso;
}

int main(int count, char **words)
{
    const int shared = memfd_create("code", MFD_CLOEXEC);
    if (count < 3 || ftruncate(shared, PAGE))
        return 2;
    unsigned char *writable = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    if (writable == MAP_FAILED)
        return 3;
    memcpy(writable, "\x0f\x05\xeb\xfe", 4);
    write_body(writable, words[1], words[2]);
    const pid_t rewriter = fork();
    if (!rewriter) {
        prctl(PR_SET_PDEATHSIG, 9);
        rewrite_for_ever(writable);
    }
    munmap(writable, PAGE);
    if (mmap(CODE, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED | MAP_FIXED, shared, 0) != CODE)
        return 4;
    char *const vdso = (char *)getauxval(AT_SYSINFO_EHDR);
    if (vdso && munmap(vdso, (char *)vdso_end(vdso) - vdso))
        return 5;
    if (forbid_mkdir(count > 3))
        return 6;
    char byte;
    const char *const forbidden = mkdir(words[2], 0700) && errno == EPERM ? "R" : "?";
    if (write(1, forbidden, 1) != 1)
        return 7;
    while (read(0, &byte, 1) == 1) /* lives on, and stays under its filter */
        if (write(1, mkdir(words[2], 0700) && errno == EPERM ? "R" : "?", 1) != 1)
            return 8;
    return 0;
}
