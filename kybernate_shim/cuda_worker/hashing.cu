/* Hashes pieces of VRAM at the speed of the GPU's memory; hashing.py says what the hash promises, and gives the keys.
 *
 * CUDA C for NVRTC. No thread waits for another, or looks at what another has: so the tests compile the same lines as C,
 * with THREADS turns of a loop in place of the threads, by other definitions of KERNEL, DEVICE and UNROLL.
 *
 * Each thread of a block goes over its piece in strides, THREADS * LOADS * 16 bytes at a time, of which it takes a chunk
 * of LOADS * 16. For each of four lanes, whose keys are independent:
 *   NH          a chunk of 32-bit words m becomes a sum of 64 bits over its pairs, (m0 + k0) * (m1 + k1) + ...
 *   polynomial  the halves of a thread's sums are the coefficients of a polynomial, evaluated at `base` modulo PRIME
 *   spread      the polynomials of the threads are added up, each times its own key, modulo PRIME
 * and 32 bits of that are the lane's part of the hash.
 */
#ifndef KERNEL
#define KERNEL extern "C" __global__ __launch_bounds__(THREADS)
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#endif

#define THREADS 128
#define LOADS 16
#define AT_ONCE 8 /* loads in flight: what keeps the memory busy */
#define LANES 4
#define PRIME 0x1fffffffffffffffULL /* 2^61 - 1 */

typedef unsigned int word;
typedef unsigned long long wide;

struct keys {
    wide base[LANES];
    word nh[LOADS * 4 + (LANES - 1) * 2]; /* a lane begins two words behind the lane before it */
};

/* What the threads of a piece add up: the halves of each lane's terms, which 64 bits hold without a carry. */
struct sums {
    wide low[LANES], high[LANES], any;
};

/* Less than 2^61 + 8, and the same modulo PRIME. */
DEVICE wide folded(wide x)
{
    return (x & PRIME) + (x >> 61);
}

/* a * b + c modulo PRIME, folded: a and b less than 2^62, c less than 2^62. */
DEVICE wide times_plus(wide a, wide b, wide c)
{
    wide low = a * b, high = __umul64hi(a, b);
    return folded((low & PRIME) + folded((high << 3) | (low >> 61)) + c);
}

DEVICE wide reduced(wide x)
{
    x = folded(x);
    return x >= PRIME ? x - PRIME : x;
}

/* One block of threads a piece. `spread` has LANES times THREADS keys; `sums` are all zero. */
KERNEL void hash_pieces(const wide *addresses, wide size, const wide *spread, struct sums *sums, const struct keys keys)
{
    const uint4 *at = (const uint4 *)addresses[blockIdx.x] + threadIdx.x;
    const uint4 *end = (const uint4 *)(addresses[blockIdx.x] + size);
    struct sums *sum = &sums[blockIdx.x];
    wide polynomial[LANES] = {0};
    word any = 0;
    for (; at < end; at += LOADS * THREADS) {
        wide nh[LANES] = {0};
        UNROLL
        for (int first = 0; first < LOADS; first += AT_ONCE) {
            uint4 chunk[AT_ONCE];
            UNROLL
            for (int i = 0; i < AT_ONCE; i++)
                chunk[i] = __ldcs(&at[(first + i) * THREADS]);
            UNROLL
            for (int i = 0; i < AT_ONCE; i++) {
                const uint4 m = chunk[i];
                any |= m.x | m.y | m.z | m.w;
                UNROLL
                for (int lane = 0; lane < LANES; lane++) {
                    const word *k = &keys.nh[(first + i) * 4 + lane * 2];
                    nh[lane] += (wide)(m.x + k[0]) * (m.y + k[1]) + (wide)(m.z + k[2]) * (m.w + k[3]);
                }
            }
        }
        UNROLL
        for (int lane = 0; lane < LANES; lane++) {
            polynomial[lane] = times_plus(polynomial[lane], keys.base[lane], nh[lane] >> 32);
            polynomial[lane] = times_plus(polynomial[lane], keys.base[lane], nh[lane] & 0xffffffff);
        }
    }
    UNROLL
    for (int lane = 0; lane < LANES; lane++) {
        wide term = reduced(times_plus(polynomial[lane], spread[lane * THREADS + threadIdx.x], 0));
        atomicAdd(&sum->low[lane], term & 0xffffffff);
        atomicAdd(&sum->high[lane], term >> 32);
    }
    if (any)
        sum->any = 1; /* every thread that writes it writes the same value */
}

/* One thread a piece: whether any bit of it is set, and LANES words of hash, which are 0 where none is. */
KERNEL void finish_pieces(const struct sums *sums, word count, word *hashes, word *any)
{
    word piece = blockIdx.x * THREADS + threadIdx.x;
    if (piece >= count)
        return;
    const struct sums *sum = &sums[piece];
    any[piece] = sum->any != 0;
    for (int lane = 0; lane < LANES; lane++) {
        wide value = reduced(times_plus(sum->high[lane], 1ULL << 32, sum->low[lane]));
        hashes[piece * LANES + lane] = sum->any ? (word)value : 0;
    }
}
