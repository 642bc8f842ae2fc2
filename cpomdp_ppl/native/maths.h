/* Elementary functions as PyTorch has them: `m_exp` of float32, and its twin `m_exp_d` of float64.

   Those of float32 are within 4 units in the last place, and most within 2. All but those under "one at a
   time" vectorise: they have no branches, and choose between values instead. */

/* Added to a number below 2^22 (2^51), it rounds to a whole number, half to even, which the last bits
   hold. */
#define ROUNDER 12582912.0f
#define ROUNDER_D 6755399441055744.0

INLINE f32 two_to(i32 n) { return of_bits((u32)(n + 127) << 23); } /* -127 < n < 128 */
INLINE f32 flip(u32 p, f32 x) { return of_bits(bits_of(x) ^ (p << 31)); }

/* -------------------------------------------------------------------------------------- exponentials */

/* x = n ln 2 + r with |r| <= ln 2 / 2, by two parts of ln 2. For a NaN, r is NaN and n anything. */
INLINE f32 exp_reduced(f32 x, i32 *n)
{
    f32 shifted = FMA(x, 1.44269504088896341f, ROUNDER), whole = shifted - ROUNDER;
    *n = (i32)((bits_of(shifted) & 0x7FFFFFu) - 0x400000u);
    return FMA(whole, 2.12194440e-4f, FMA(whole, -0.693359375f, x));
}

/* e^r - 1 of a reduced r. */
INLINE f32 expm1_of_reduced(f32 r)
{
    f32 p = 1.9875691500e-4f;
    p = FMA(p, r, 1.3981999507e-3f);
    p = FMA(p, r, 8.3334519073e-3f);
    p = FMA(p, r, 4.1665795894e-2f);
    p = FMA(p, r, 1.6666665459e-1f);
    p = FMA(p, r, 5.0000001201e-1f);
    return FMA(p * r, r, r);
}

/* 2^shift e^x. The power of two comes in halves: neither overflows, and the smallest numbers are rounded
   once. */
INLINE f32 exp_shifted(f32 x, i32 shift)
{
    i32 n;
    f32 y = x < -104.0f ? -104.0f : x;
    y = y > 89.5f ? 89.5f : y;
    f32 e = 1.0f + expm1_of_reduced(exp_reduced(y, &n));
    n += shift;
    return e * two_to(n >> 1) * two_to(n - (n >> 1));
}

INLINE f32 m_exp(f32 x) { return exp_shifted(x, 0); }

INLINE f32 m_expm1(f32 x)
{
    i32 n;
    f32 y = x < -30.0f ? -30.0f : x;
    y = y > 89.0f ? 89.0f : y;
    f32 p = expm1_of_reduced(exp_reduced(y, &n)), half = two_to(n - 1);
    f32 e = 2.0f * FMA(half, p, half - 0.5f);
    return x == 0.0f ? x : e;
}

INLINE f32 m_sigmoid(f32 x) { return 1.0f / (1.0f + m_exp(-x)); }

INLINE f32 m_tanh(f32 x)
{
    f32 a = fabsf(x), z = x * x;
    f32 p = -5.70498872745e-3f;
    p = FMA(p, z, 2.06390887954e-2f);
    p = FMA(p, z, -5.37397155531e-2f);
    p = FMA(p, z, 1.33314422036e-1f);
    p = FMA(p, z, -3.33332819422e-1f);
    f32 near = FMA(p * z, a, a), far = 1.0f - 2.0f / (m_exp(2.0f * a) + 1.0f);
    return copysignf(a < 0.625f ? near : far, x);
}

INLINE f32 m_sinh(f32 x)
{
    f32 a = fabsf(x), z = x * x;
    f32 p = FMA(FMA(2.03721912945e-4f, z, 8.33028376239e-3f), z, 1.66667160211e-1f);
    f32 near = FMA(p * z, a, a), far = exp_shifted(a, -1) - exp_shifted(-a, -1);
    return copysignf(a < 1.0f ? near : far, x);
}

INLINE f32 m_cosh(f32 x) { return exp_shifted(fabsf(x), -1) + exp_shifted(-fabsf(x), -1); }

/* ----------------------------------------------------------------------------------------- logarithms */

/* x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), of a positive x >= 1.2e-38. */
INLINE f32 log_reduced(f32 x, f32 *e)
{
    u32 bits = bits_of(x);
    i32 power = (i32)(bits - 0x3F3504F3u) >> 23;
    *e = (f32)power;
    return of_bits(bits - ((u32)power << 23)) - 1.0f;
}

/* log(2^e (1 + f)) + rest, where the rest is small beside the logarithm. */
INLINE f32 log_of_reduced(f32 f, f32 e, f32 rest)
{
    f32 z = f * f, p = 7.0376836292e-2f;
    p = FMA(p, f, -1.1514610310e-1f);
    p = FMA(p, f, 1.1676998740e-1f);
    p = FMA(p, f, -1.2420140846e-1f);
    p = FMA(p, f, 1.4249322787e-1f);
    p = FMA(p, f, -1.6668057665e-1f);
    p = FMA(p, f, 2.0000714765e-1f);
    p = FMA(p, f, -2.4999993993e-1f);
    p = FMA(p, f, 3.3333331174e-1f);
    f32 small = FMA(p * f, z, FMA(e, -2.12194440e-4f, rest));
    return FMA(e, 0.693359375f, f + FMA(z, -0.5f, small));
}

INLINE f32 m_log(f32 x)
{
    f32 e, tiny = x < 1.17549435e-38f ? 25.0f : 0.0f;
    f32 f = log_reduced(x < 1.17549435e-38f ? x * 33554432.0f : x, &e);
    f32 y = log_of_reduced(f, e - tiny, 0.0f);
    y = x < INFINITY ? y : x;
    return x > 0.0f ? y : (x == 0.0f ? -INFINITY : NAN);
}

INLINE f32 m_log1p(f32 x)
{
    f32 e, u = 1.0f + x, lost = x < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x);
    f32 f = log_reduced(u, &e);
    f32 y = log_of_reduced(e == 0.0f ? x : f, e, e == 0.0f ? 0.0f : lost / u);
    y = x < INFINITY ? y : x;
    y = x > -1.0f ? y : (x == -1.0f ? -INFINITY : NAN);
    return x == 0.0f ? x : y;
}

/* torch.nn.functional.softplus, with its threshold. */
INLINE f32 m_softplus(f32 x) { f32 y = m_log1p(m_exp(x)); return x > 20.0f ? x : y; }

INLINE f32 m_logsigmoid(f32 x) { return (x > 0.0f ? 0.0f : x) - m_log1p(m_exp(-fabsf(x))); }

/* -------------------------------------------------------------------------------------- trigonometry */

INLINE u32 sel_bits(u32 mask, u32 a, u32 b) { return b ^ (mask & (a ^ b)); }

/* |x| 2/pi modulo 4, in units of 2^-30, of 2^20 <= |x| < infinity. x is a whole number of 24 bits times a
   power of two, which says at which bit of 2/pi (the words w) those begin that do not give multiples of 4
   (Payne and Hanek, 1983). Masks, since a compiler does not vectorise shifts of constants that a branch has
   chosen. */
INLINE u32 turns_of_huge(u32 bits)
{
    const u32 w0 = 0x0517CC1Bu, w1 = 0x727220A9u, w2 = 0x4FE13ABEu;
    const u32 w3 = 0x8FA9A6EEu, w4 = 0x06DB14ACu, w5 = 0xC9E21C82u;
    u32 power = (bits >> 23) & 0xFFu, whole = (bits & 0x7FFFFFu) | 0x800000u;
    u32 from = power > 147u ? power - 147u : 0u, shift = from & 31u;
    u32 far = 0u - (from >> 6), odd = 0u - ((from >> 5) & 1u);
    u32 v0 = sel_bits(far, w2, w0), v1 = sel_bits(far, w3, w1);
    u32 v2 = sel_bits(far, w4, w2), v3 = sel_bits(far, w5, w3);
    u32 a = sel_bits(odd, v1, v0), b = sel_bits(odd, v2, v1), c = sel_bits(odd, v3, v2);
    a = (a << shift) | ((b >> 1) >> (31u - shift));
    b = (b << shift) | ((c >> 1) >> (31u - shift));
    return whole * a + (u32)(((u64)whole * b) >> 32);
}

/* x = q pi/2 + r with |r| <= pi/4, and q modulo 4; of every x, however large. Below 2^20, r is rounded once;
   beyond, where neighbouring numbers are an eighth apart and more, it is within 2e-9. */
INLINE f32 trig_reduced(f32 x, u32 *q)
{
    f64 shifted = (f64)x * 0.63661977236758134 + ROUNDER_D, whole = shifted - ROUNDER_D;
    f64 near = FMA_D(whole, -6.077100506506192e-11, FMA_D(whole, -1.5707963267341256, (f64)x));
    u32 bits = bits_of(x), turns = turns_of_huge(bits), sign = bits >> 31;
    f32 far = (f32)(i32)(turns << 2 | 2u) * 3.6572951e-10f;
    int huge = fabsf(x) >= 1048576.0f && fabsf(x) < INFINITY;
    turns = (turns + 0x20000000u) >> 30;
    *q = huge ? (turns ^ (0u - sign)) + sign : (u32)bits_of_d(shifted);
    return huge ? flip(sign, far) : (f32)near;
}

INLINE f32 sin_of_reduced(f32 r)
{
    f32 z = r * r, p = FMA(FMA(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f);
    return FMA(p * z, r, r);
}

INLINE f32 cos_of_reduced(f32 r)
{
    f32 z = r * r, p = FMA(FMA(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
    return FMA(p * z, z, FMA(z, -0.5f, 1.0f));
}

INLINE f32 m_sin(f32 x)
{
    u32 q;
    f32 r = trig_reduced(x, &q), s = sin_of_reduced(r), c = cos_of_reduced(r);
    return x == 0.0f ? x : flip(q >> 1, q & 1u ? c : s);
}

INLINE f32 m_cos(f32 x)
{
    u32 q;
    f32 r = trig_reduced(x, &q), s = sin_of_reduced(r), c = cos_of_reduced(r);
    return flip((q + 1u) >> 1, q & 1u ? s : c);
}

INLINE f32 m_tan(f32 x)
{
    u32 q;
    f32 r = trig_reduced(x, &q), s = sin_of_reduced(r), c = cos_of_reduced(r);
    return x == 0.0f ? x : flip(q, (q & 1u ? c : s) / (q & 1u ? s : c));
}

/* The angle of (x, y) in the first quadrant, for x, y >= 0. */
INLINE f32 first_quadrant(f32 y, f32 x)
{
    int steep = y > x;
    f32 top = steep ? x : y, bottom = steep ? y : x, scale = bottom > 1e38f ? 0.25f : 1.0f;
    int same = top == INFINITY; /* then, both are */
    top = same ? 1.0f : top * scale;
    bottom = same || bottom == 0.0f ? 1.0f : bottom * scale;
    int wide = top > 0.41421356f * bottom;
    f32 t = (wide ? top - bottom : top) / (wide ? top + bottom : bottom), z = t * t;
    f32 p = FMA(FMA(8.05374449538e-2f, z, -1.38776856032e-1f), z, 1.99777106478e-1f);
    p = FMA(p, z, -3.33329491539e-1f);
    f32 r = FMA(p * z, t, t);
    r = wide ? 0.785398163f + r : r;
    return steep ? 1.57079637f - (r + 4.37113883e-8f) : r;
}

INLINE f32 m_atan(f32 x) { return copysignf(first_quadrant(fabsf(x), 1.0f), x); }

INLINE f32 m_atan2(f32 y, f32 x)
{
    f32 r = first_quadrant(fabsf(y), fabsf(x));
    r = bits_of(x) >> 31 ? 3.14159274f - (r + 8.74227766e-8f) : r;
    return x != x || y != y ? NAN : copysignf(r, y);
}

/* asin of a root s of z, for s <= 1/2. */
INLINE f32 asin_of_reduced(f32 s, f32 z)
{
    f32 p = 4.2163199048e-2f;
    p = FMA(p, z, 2.4181311049e-2f);
    p = FMA(p, z, 4.5470025998e-2f);
    p = FMA(p, z, 7.4953002686e-2f);
    p = FMA(p, z, 1.6666752422e-1f);
    return FMA(p * z, s, s);
}

INLINE f32 m_asin(f32 x)
{
    f32 a = fabsf(x), z = a > 0.5f ? 0.5f * (1.0f - a) : a * a;
    f32 r = asin_of_reduced(a > 0.5f ? sqrtf(z) : a, z);
    return copysignf(a > 0.5f ? 1.57079637f - (2.0f * r + 4.37113883e-8f) : r, x);
}

INLINE f32 m_acos(f32 x)
{
    f32 a = fabsf(x), z = a > 0.5f ? 0.5f * (1.0f - a) : a * a;
    f32 r = asin_of_reduced(a > 0.5f ? sqrtf(z) : x, z);
    f32 outer = x < 0.0f ? 3.14159274f - (2.0f * r + 8.74227766e-8f) : 2.0f * r;
    return a > 0.5f ? outer : 1.57079637f - (r + 4.37113883e-8f);
}

/* ------------------------------------------------------------------------------------------- the rest */

INLINE f32 m_hypot(f32 x, f32 y)
{
    f32 r = (f32)sqrt((f64)x * x + (f64)y * y);
    return fabsf(x) == INFINITY || fabsf(y) == INFINITY ? INFINITY : r;
}

/* Within 1.5 units in the last place: divided by a power of two, no square overflows or is lost. */
INLINE f64 m_hypot_d(f64 x, f64 y)
{
    f64 a = fabs(x), b = fabs(y);
    u64 least = 1ull << 52, most = 2045ull << 52, power = bits_of_d(a > b ? a : b) & 2047ull << 52;
    power = power < least ? least : power;
    power = power > most ? most : power;
    f64 shrink = of_bits_d((2046ull << 52) - power), u = a * shrink, v = b * shrink;
    f64 r = sqrt(u * u + v * v) * of_bits_d(power);
    return a == INFINITY || b == INFINITY ? INFINITY : r;
}

INLINE f32 m_sign(f32 x) { return (f32)((x > 0.0f) - (x < 0.0f)); }
INLINE f64 m_sign_d(f64 x) { return (f64)((x > 0.0) - (x < 0.0)); }
INLINE f32 m_round(f32 x) { return rintf(x); }
INLINE f64 m_round_d(f64 x) { return rint(x); }

/* torch.minimum and torch.maximum: NaN if either is NaN. */
INLINE f32 m_min(f32 x, f32 y) { return x != x || x < y ? x : y; }
INLINE f32 m_max(f32 x, f32 y) { return x != x || x > y ? x : y; }
INLINE f64 m_min_d(f64 x, f64 y) { return x != x || x < y ? x : y; }
INLINE f64 m_max_d(f64 x, f64 y) { return x != x || x > y ? x : y; }

/* The exact rest of x / y, of the sign of x. The quotient, of up to 277 bits, is taken away 46 bits at a
   time: it is rounded to a multiple of 2^k, and one instruction takes its product with y away, exactly. Where
   there is no such instruction, one float64 division does for quotients below 2^29, and the library for
   others; that does not vectorise. */
#if defined(ONE_ROUNDING)
INLINE f64 less_multiples(f64 x, f64 y, f64 inverse, f64 unit)
{
    f64 rounder = ROUNDER_D * unit, q = FMA_D(x, inverse, rounder) - rounder;
    return FMA_D(-q, y, x);
}
INLINE f32 m_fmod(f32 x, f32 y)
{
    f64 d = fabs((f64)y), inverse = 1.0 / d, r = fabs((f64)x);
    r = less_multiples(r, d, inverse, 0x1p230);
    r = less_multiples(r, d, inverse, 0x1p184);
    r = less_multiples(r, d, inverse, 0x1p138);
    r = less_multiples(r, d, inverse, 0x1p92);
    r = less_multiples(r, d, inverse, 0x1p46);
    r = less_multiples(r, d, inverse, 1.0);
    r = r < 0.0 ? r + d : r;
    f32 rest = copysignf((f32)r, x);
    return fabsf(x) < INFINITY && fabsf(y) == INFINITY ? x : rest;
}
#else
INLINE f32 m_fmod(f32 x, f32 y)
{
    f64 quotient = (f64)x / y;
    if (!(fabs(quotient) < 0x1p29 && fabsf(y) < INFINITY)) return fmodf(x, y);
    return copysignf((f32)(x - trunc(quotient) * y), x);
}
#endif

/* torch.remainder: of the sign of the divisor. */
INLINE f32 m_remainder(f32 x, f32 y)
{
    f32 r = m_fmod(x, y), moved = r + y;
    return r != 0.0f && (y < 0.0f) != (r < 0.0f) ? moved : r;
}

/* torch.floor_divide: consistent with the remainder, which floor(x / y) is not. */
INLINE f32 m_floor_div(f32 x, f32 y)
{
    f32 r = m_fmod(x, y), q = (x - r) / y, ratio = x / y;
    q -= r != 0.0f && (y < 0.0f) != (r < 0.0f) ? 1.0f : 0.0f;
    f32 whole = floorf(q);
    whole += q - whole > 0.5f ? 1.0f : 0.0f;
    whole = q == 0.0f ? copysignf(0.0f, ratio) : whole;
    return y == 0.0f ? ratio : whole;
}

/* ------------------------------------------------------------------------------------ one at a time */

INLINE f32 m_erf(f32 x) { return erff(x); }
INLINE f32 m_erfc(f32 x) { return erfcf(x); }
INLINE f32 m_pow(f32 x, f32 y) { return powf(x, y); }
INLINE f32 m_lgamma(f32 x) { return (f32)lgamma(x); }

/* By the recurrence up to 10, then the asymptotic series; below zero by reflection. */
FUNCTION f64 m_digamma_d(f64 x)
{
    f64 y = 0.0;
    if (x == 0.0) return copysign(INFINITY, -x);
    if (x < 0.0) {
        if (x == floor(x)) return NAN;
        y = -3.14159265358979324 / tan(3.14159265358979324 * (x - trunc(x)));
        x = 1.0 - x;
    }
    for (; x < 10.0; x += 1.0) y -= 1.0 / x;
    f64 z = 1.0 / (x * x), p = 8.33333333333333333333e-2;
    p = p * z - 2.10927960927960927961e-2;
    p = p * z + 7.57575757575757575758e-3;
    p = p * z - 4.16666666666666666667e-3;
    p = p * z + 3.96825396825396825397e-3;
    p = p * z - 8.33333333333333333333e-3;
    p = p * z + 8.33333333333333333333e-2;
    return y + log(x) - 0.5 / x - p * z;
}
INLINE f32 m_digamma(f32 x) { return (f32)m_digamma_d(x); }

INLINE f64 polynomial(f64 x, const f64 *c, int degree)
{
    f64 p = c[degree];
    for (int i = degree - 1; i >= 0; i--) p = p * x + c[i];
    return p;
}

/* The standard normal quantile of 1/2 + q; `tail` is the smaller of 1/2 + q and 1/2 - q. AS 241 (Wichura,
   1988). */
FUNCTION f64 normal_quantile(f64 q, f64 tail)
{
    static const f64 a[] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                            1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                            3.3430575583588128105e4, 2.5090809287301226727e3};
    static const f64 b[] = {1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
                            2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
                            5.2264952788528545610e3};
    static const f64 c[] = {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
                            3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
                            2.27238449892691845833e-2, 7.74545014278341407640e-4};
    static const f64 d[] = {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0,
                            6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
                            5.47593808499534494600e-4, 1.05075007164441684324e-9};
    static const f64 e[] = {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
                            2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                            2.71155556874348757815e-5, 2.01033439929228813265e-7};
    static const f64 f[] = {1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1,
                            1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5,
                            1.42151175831644588870e-7, 2.04426310338993978564e-15};
    if (!(tail >= 0.0)) return NAN;
    if (tail == 0.0) return copysign(INFINITY, q);
    if (fabs(q) <= 0.425) {
        f64 r = 0.180625 - q * q;
        return q * polynomial(r, a, 7) / polynomial(r, b, 7);
    }
    f64 r = sqrt(-log(tail));
    f64 x = r <= 5.0 ? polynomial(r - 1.6, c, 7) / polynomial(r - 1.6, d, 7)
                     : polynomial(r - 5.0, e, 7) / polynomial(r - 5.0, f, 7);
    return copysign(x, q);
}

/* torch.special.ndtri */
FUNCTION f64 m_ndtri_d(f64 p) { return normal_quantile(p - 0.5, p < 0.5 ? p : 1.0 - p); }
INLINE f32 m_ndtri(f32 p) { return (f32)m_ndtri_d(p); }

FUNCTION f64 m_erfinv_d(f64 x)
{
    return normal_quantile(0.5 * x, 0.5 - 0.5 * fabs(x)) * 0.707106781186547524;
}
INLINE f32 m_erfinv(f32 x) { return (f32)m_erfinv_d(x); }

INLINE f64 m_exp_d(f64 x) { return exp(x); }
INLINE f64 m_log_d(f64 x) { return log(x); }
INLINE f64 m_log1p_d(f64 x) { return log1p(x); }
INLINE f64 m_expm1_d(f64 x) { return expm1(x); }
INLINE f64 m_sin_d(f64 x) { return sin(x); }
INLINE f64 m_cos_d(f64 x) { return cos(x); }
INLINE f64 m_tan_d(f64 x) { return tan(x); }
INLINE f64 m_tanh_d(f64 x) { return tanh(x); }
INLINE f64 m_sigmoid_d(f64 x) { return 1.0 / (1.0 + exp(-x)); }
INLINE f64 m_softplus_d(f64 x) { return x > 20.0 ? x : log1p(exp(x)); }
INLINE f64 m_logsigmoid_d(f64 x) { return (x > 0.0 ? 0.0 : x) - log1p(exp(-fabs(x))); }
INLINE f64 m_atan_d(f64 x) { return atan(x); }
INLINE f64 m_atan2_d(f64 y, f64 x) { return atan2(y, x); }
INLINE f64 m_asin_d(f64 x) { return asin(x); }
INLINE f64 m_acos_d(f64 x) { return acos(x); }
INLINE f64 m_sinh_d(f64 x) { return sinh(x); }
INLINE f64 m_cosh_d(f64 x) { return cosh(x); }
INLINE f64 m_erf_d(f64 x) { return erf(x); }
INLINE f64 m_erfc_d(f64 x) { return erfc(x); }
INLINE f64 m_lgamma_d(f64 x) { return lgamma(x); }
INLINE f64 m_pow_d(f64 x, f64 y) { return pow(x, y); }
INLINE f64 m_fmod_d(f64 x, f64 y) { return fmod(x, y); }
INLINE f64 m_remainder_d(f64 x, f64 y)
{
    f64 r = fmod(x, y);
    return r != 0.0 && (y < 0.0) != (r < 0.0) ? r + y : r;
}
INLINE f64 m_floor_div_d(f64 x, f64 y)
{
    f64 r = fmod(x, y), q = (x - r) / y;
    if (y == 0.0) return x / y;
    if (r != 0.0 && (y < 0.0) != (r < 0.0)) q -= 1.0;
    if (q == 0.0) return copysign(0.0, x / y);
    f64 whole = floor(q);
    return q - whole > 0.5 ? whole + 1.0 : whole;
}

/* ------------------------------------------------------------------------------------------ integers */

/* Python's // and %. A divisor of 0 gives 0: whoever calls them says that this is an error. What does not fit
   wraps around, as in PyTorch. */
INLINE i64 i_floor_div(i64 x, i64 y)
{
    if (y == 0) return 0;
    if (y == -1) return (i64)(0u - (u64)x); /* the processor traps on the least number */
    return x / y - (x % y != 0 && (x < 0) != (y < 0));
}
INLINE i64 i_remainder(i64 x, i64 y)
{
    if (y == 0 || y == -1) return 0;
    i64 r = x % y;
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}

/* torch.pow: 1 / x^|n| without its fraction for n < 0, and 0 for x = 0. */
FUNCTION i64 i_pow(i64 x, i64 n)
{
    if (n < 0) return x == 1 || x == -1 ? (n & 1 ? x : 1) : 0;
    u64 power = 1, base = (u64)x;
    for (; n; n >>= 1, base *= base)
        if (n & 1) power *= base;
    return (i64)power;
}
