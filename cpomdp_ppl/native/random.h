/* Random numbers: xoshiro128++ (Blackman and Vigna, 2019) in LANES streams side by side, begun from a key.

   A filler writes n numbers that depend on the key, on what was drawn before and on n alone. Its arrays,
   `scratch` too, have room up to the next multiple of 32, and are aligned to 64 bytes. */

typedef struct { u32 s[4][LANES]; } Rng;

/* splitmix64 (Steele, Lea and Flood, 2014): neighbouring numbers go to ones that have nothing in common. */
INLINE u64 mixed(u64 z)
{
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* One key of several numbers, in this order: of a seed, an episode, a step, a site, say. */
INLINE u64 key_of(u64 seed, u64 a, u64 b, u64 c) { return mixed(mixed(mixed(mixed(seed) ^ a) ^ b) ^ c); }

/* A uniform number in [0, 1), of 53 bits. */
INLINE f64 uniform_of(u64 key) { return (f64)(mixed(key) >> 11) * 0x1p-53; }

INLINE u32 rotated(u32 x, int by) { return x << by | x >> (32 - by); }

/* Each lane mixes both halves of the key, its number and a constant by quarter-rounds of ChaCha (Bernstein,
   2008). These lose nothing, so that different keys and lanes begin differently; and zero alone goes to zero,
   so that no lane begins with the one state that xoshiro never leaves. Three rounds pass the tests; six are
   safe. */
FUNCTION void rng_begin(Rng *rng, u64 key)
{
    u32 low = (u32)key, high = (u32)(key >> 32);
    for (int j = 0; j < LANES; j++) {
        u32 a = low, b = high, c = 0x9E3779B9u * (u32)(j + 1), d = 0x79622D32u;
#pragma GCC unroll 6
        for (int round = 0; round < 6; round++) {
            a += b, d = rotated(d ^ a, 16);
            c += d, b = rotated(b ^ c, 12);
            a += b, d = rotated(d ^ a, 8);
            c += d, b = rotated(b ^ c, 7);
        }
        rng->s[0][j] = a, rng->s[1][j] = b, rng->s[2][j] = c, rng->s[3][j] = d;
    }
}

INLINE int padded(int n) { return (n + 31) & ~31; }

/* 32 random bits each, up to the next multiple of 32. */
FUNCTION void fill_words(Rng *rng, u32 *restrict out, int n)
{
    Rng now = *rng;
    for (int i = 0; i < padded(n); i += LANES)
        for (int j = 0; j < LANES; j++) {
            u32 a = now.s[0][j], b = now.s[1][j], c = now.s[2][j], d = now.s[3][j];
            out[i + j] = rotated(a + d, 7) + a;
            c ^= a, d ^= b;
            now.s[0][j] = a ^ d, now.s[1][j] = b ^ c;
            now.s[2][j] = c ^ (b << 9), now.s[3][j] = rotated(d, 11);
        }
    *rng = now;
}

/* 64 random bits each, such as samplers begin from. */
FUNCTION void fill_bits(Rng *rng, u64 *restrict out, u32 *restrict scratch, int n)
{
    fill_words(rng, scratch, n);
    for (int i = 0; i < n; i++) out[i] = (u64)scratch[i] << 32;
    fill_words(rng, scratch, n);
    for (int i = 0; i < n; i++) out[i] |= scratch[i];
}

/* Multiples of 2^-24 in [0, 1). */
FUNCTION void fill_uniform(Rng *rng, f32 *restrict out, u32 *restrict scratch, int n)
{
    fill_words(rng, scratch, n);
    for (int i = 0; i < n; i++) out[i] = (f32)(i32)(scratch[i] >> 8) * 0x1p-24f;
}

/* Odd multiples of 2^-53: never 0, never 1. */
FUNCTION void fill_uniform_d(Rng *rng, f64 *restrict out, u32 *restrict scratch, int n)
{
    fill_words(rng, scratch, n);
    for (int i = 0; i < n; i++) out[i] = (f64)scratch[i] * 0x1p-32;
    fill_words(rng, scratch, n);
    for (int i = 0; i < n; i++) out[i] += (f64)(i32)(scratch[i] >> 11 | 1u) * 0x1p-53;
}

/* Box and Muller (1958): a radius of 32 bits, which reaches 6.7, and an angle of 32 bits, of which the first
   two are its quadrant. */
FUNCTION void fill_normal(Rng *rng, f32 *restrict out, u32 *restrict scratch, int n)
{
    int half = padded(n) / 2;
    const u32 *restrict other = scratch + half;
    f32 *restrict second = out + half;
    fill_words(rng, scratch, n);
    for (int i = 0; i < half; i++) {
        f32 e, f = log_reduced(FMA((f32)scratch[i], 0x1p-32f, 0x1p-33f), &e);
        f32 radius = sqrtf(-2.0f * log_of_reduced(f, e, 0.0f));
        u32 q = other[i] >> 30;
        f32 r = (f32)((i32)(other[i] << 2) >> 2 | 1) * (f32)(1.57079632679489662 * 0x1p-30);
        f32 s = sin_of_reduced(r), c = cos_of_reduced(r);
        out[i] = radius * flip(q >> 1, q & 1u ? s : c);
        second[i] = radius * flip(q >> 1, q & 1u ? c : s);
    }
}

/* log u of 2^-65 <= u <= 1, within 1e-16 of itself. */
INLINE f64 log_of_uniform(f64 u)
{
    u64 bits = bits_of_d(u);
    i32 power = (i32)((u32)(bits >> 32) - 0x3FE6A09Eu) >> 20;
    f64 e = (f64)power, f = of_bits_d(bits - ((u64)(u32)power << 52)) - 1.0;
    f64 s = f / (2.0 + f), z = s * s, p = 1.479819860511658591e-1;
    p = FMA_D(p, z, 1.531383769920937332e-1);
    p = FMA_D(p, z, 1.818357216161805012e-1);
    p = FMA_D(p, z, 2.222219843214978396e-1);
    p = FMA_D(p, z, 2.857142874366239149e-1);
    p = FMA_D(p, z, 3.999999999940941908e-1);
    p = FMA_D(p, z, 6.666666666666735130e-1);
    f64 square = 0.5 * f * f, rest = FMA_D(s, FMA_D(p, z, square), e * 1.90821492927058770002e-10);
    return FMA_D(e, 6.93147180369123816490e-1, f - (square - rest));
}

/* sin r and cos r of |r| <= pi/4. */
INLINE f64 sin_of_reduced_d(f64 r)
{
    f64 z = r * r, p = 1.58969099521155010221e-10;
    p = FMA_D(p, z, -2.50507602534068634195e-8);
    p = FMA_D(p, z, 2.75573137070700676789e-6);
    p = FMA_D(p, z, -1.98412698298579493134e-4);
    p = FMA_D(p, z, 8.33333333332248946124e-3);
    p = FMA_D(p, z, -1.66666666666666324348e-1);
    return FMA_D(p * z, r, r);
}
INLINE f64 cos_of_reduced_d(f64 r)
{
    f64 z = r * r, p = -1.13596475577881948265e-11;
    p = FMA_D(p, z, 2.08757232129817482790e-9);
    p = FMA_D(p, z, -2.75573143513906633035e-7);
    p = FMA_D(p, z, 2.48015872894767294178e-5);
    p = FMA_D(p, z, -1.38888888888741095749e-3);
    p = FMA_D(p, z, 4.16666666666666019037e-2);
    return FMA_D(p * z, z, FMA_D(z, -0.5, 1.0));
}

/* As `fill_normal`, with 64 bits for the radius, which reaches 9.4, and 53 or more for the angle. */
FUNCTION void fill_normal_d(Rng *rng, f64 *restrict out, u32 *restrict scratch, int n)
{
    int half = padded(n) / 2;
    fill_words(rng, scratch, n);
    for (int i = 0; i < 2 * half; i++) out[i] = (f64)scratch[i] * 0x1p-32;
    fill_words(rng, scratch, n);
    for (int i = 0; i < 2 * half; i++) out[i] += ((f64)scratch[i] + 0.5) * 0x1p-64;
    f64 *restrict second = out + half;
    for (int i = 0; i < half; i++) {
        f64 radius = sqrt(-2.0 * log_of_uniform(out[i])), shifted = 4.0 * second[i] + ROUNDER_D;
        f64 r = (4.0 * second[i] - (shifted - ROUNDER_D)) * 1.57079632679489662;
        f64 s = sin_of_reduced_d(r), c = cos_of_reduced_d(r);
        u64 q = bits_of_d(shifted);
        f64 x = q & 1u ? s : c, y = q & 1u ? c : s;
        out[i] = radius * of_bits_d(bits_of_d(x) ^ (q >> 1 << 63));
        second[i] = radius * of_bits_d(bits_of_d(y) ^ (q >> 1 << 63));
    }
}
