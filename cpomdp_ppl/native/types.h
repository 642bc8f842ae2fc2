/* Types. Every kernel begins with these files: types.h, maths.h, random.h and samplers.h.

   They are plain C that compilers vectorise inside a simple loop over arrays, on any processor. NaN and
   infinities behave as in IEEE 754 and PyTorch, so that they must not be compiled with -ffast-math. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

typedef float f32;
typedef double f64;
typedef int32_t i32;
typedef int64_t i64;
typedef uint32_t u32;
typedef uint64_t u64;
typedef uint8_t u8;

/* Streams of random numbers that run side by side: as many 32-bit words as the widest registers hold. */
enum { LANES = 16 };

#define INLINE static inline __attribute__((always_inline, unused))
#define FUNCTION static __attribute__((unused))

/* a b + c, with one rounding where the processor does that in one instruction. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define ONE_ROUNDING 1
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#define FMA_D(a, b, c) __builtin_fma(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#define FMA_D(a, b, c) ((a) * (b) + (c))
#endif

INLINE u32 bits_of(f32 x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
INLINE f32 of_bits(u32 bits) { f32 x; memcpy(&x, &bits, 4); return x; }
INLINE u64 bits_of_d(f64 x) { u64 bits; memcpy(&bits, &x, 8); return bits; }
INLINE f64 of_bits_d(u64 bits) { f64 x; memcpy(&x, &bits, 8); return x; }

/* Numbers below 1.2e-38 (2.2e-308) are slow on many processors. A kernel takes them for zero while it runs:
   what `denormals_off` returns goes to `denormals_back` before the kernel returns. */
#if defined(__SSE2__)
FUNCTION unsigned denormals_off(void) { unsigned was = _mm_getcsr(); _mm_setcsr(was | 0x8040u); return was; }
FUNCTION void denormals_back(unsigned was) { _mm_setcsr(was); }
#elif defined(__aarch64__)
FUNCTION unsigned denormals_off(void)
{
    u64 was;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(was));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(was | (1u << 24)));
    return (unsigned)was;
}
FUNCTION void denormals_back(unsigned was) { __asm__ __volatile__("msr fpcr, %0" : : "r"((u64)was)); }
#else
FUNCTION unsigned denormals_off(void) { return 0; }
FUNCTION void denormals_back(unsigned was) { (void)was; }
#endif
