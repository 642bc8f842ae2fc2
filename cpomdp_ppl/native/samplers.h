/* One draw of a distribution from 64 random bits: the same bits and parameters give the same draw.

   NaN and parameters that the distribution does not have give NaN. What is tried again is taken with a
   probability of more than a half each time, whatever the parameters. A gamma that is too small for a float64
   is 0, and a beta may be 0 or 1: whoever needs numbers inside the support clamps them, as PyTorch does. */

/* Uniform in (0, 1): the next of a stream of its own. */
INLINE f64 next_uniform(u64 *stream)
{
    u64 bits = mixed(*stream);
    *stream += 0x9E3779B97F4A7C15u;
    return (f64)(i64)(bits >> 11 | 1u) * 0x1p-53;
}

FUNCTION f64 next_normal(u64 *stream)
{
    f64 radius = sqrt(-2.0 * log(next_uniform(stream)));
    return radius * cos(6.28318530717958648 * next_uniform(stream));
}

INLINE int is_positive(f64 x) { return x > 0.0 && x < INFINITY; }

/* ------------------------------------------------------------------------------------ gamma and beta */

/* A gamma with a scale of 1 and a >= 1: Marsaglia and Tsang (2000). */
FUNCTION f64 next_gamma(u64 *stream, f64 a)
{
    f64 d = a - 1.0 / 3.0, c = 1.0 / sqrt(9.0 * d);
    for (;;) {
        f64 x = next_normal(stream), u = next_uniform(stream), t = c * x, root = 1.0 + t;
        if (root <= 0.0) continue;
        f64 v = root * root * root, below = 3.0 * (log1p(t) - t) - t * t * (3.0 + t); /* 1 - v + log v */
        if (u < 1.0 - 0.0331 * x * x * x * x || log(u) < 0.5 * x * x + d * below) return d * v;
    }
}

FUNCTION f64 draw_gamma(u64 bits, f64 concentration)
{
    f64 a = concentration;
    if (!is_positive(a)) return NAN;
    if (a >= 1.0) return next_gamma(&bits, a);
    f64 g = next_gamma(&bits, a + 1.0);
    return g * pow(next_uniform(&bits), 1.0 / a);
}

/* Below 1, a gamma is one of a + 1 times U^(1/a). Its logarithm is there when it is too small for a
   float64. */
INLINE f64 next_log_gamma(u64 *stream, f64 a)
{
    f64 g = log(next_gamma(stream, a < 1.0 ? a + 1.0 : a));
    return a < 1.0 ? g + log(next_uniform(stream)) / a : g;
}

FUNCTION f64 draw_beta(u64 bits, f64 concentration1, f64 concentration0)
{
    f64 a = concentration1, b = concentration0;
    if (!is_positive(a) || !is_positive(b)) return NAN;
    if (a >= 1.0 && b >= 1.0) {
        f64 g = next_gamma(&bits, a);
        return 1.0 / (1.0 + next_gamma(&bits, b) / g);
    }
    f64 g = next_log_gamma(&bits, a), h = next_log_gamma(&bits, b);
    if (g == -INFINITY && h == -INFINITY) return next_uniform(&bits) * (a + b) < a; /* the limit */
    return 1.0 / (1.0 + exp(h - g));
}

/* ------------------------------------------------------------------------------- poisson and binomial */

/* log k! - (k log k - k), of a whole k >= 0. */
FUNCTION f64 factorial_rest(f64 k)
{
    if (k < 10.0) {
        f64 factorial = 1.0;
        for (f64 i = 2.0; i <= k; i += 1.0) factorial *= i;
        return k == 0.0 ? 0.0 : log(factorial) - k * log(k) + k;
    }
    f64 z = 1.0 / (k * k);
    f64 series = (1.0 / 12.0 - z * (1.0 / 360.0 - z * (1.0 / 1260.0 - z * (1.0 / 1680.0 - z / 1188.0)))) / k;
    return 0.5 * log(6.28318530717958648 * k) + series;
}

/* k log(k / mean) + mean - k, which stays exact when both are large (Loader, 2000). */
INLINE f64 deviance(f64 k, f64 mean)
{
    f64 d = (k - mean) / mean;
    return k == 0.0 ? mean : mean * ((1.0 + d) * log1p(d) - d);
}

/* By inversion below a mean of 10; else by transformed rejection, PTRS (Hörmann, 1993). */
FUNCTION f64 draw_poisson(u64 bits, f64 rate)
{
    if (!(rate >= 0.0 && rate < INFINITY)) return NAN;
    if (rate < 10.0) {
        f64 u = next_uniform(&bits), p = exp(-rate), k = 0.0;
        for (; u > p && p > 1e-18; p *= rate / k) u -= p, k += 1.0;
        return k;
    }
    f64 b = 0.931 + 2.53 * sqrt(rate), a = -0.059 + 0.02483 * b;
    f64 scale = 1.1239 + 1.1328 / (b - 3.4), quick = 0.9277 - 3.6224 / (b - 2.0);
    for (;;) {
        f64 u = next_uniform(&bits) - 0.5, v = next_uniform(&bits), us = 0.5 - fabs(u);
        f64 k = floor((2.0 * a / us + b) * u + rate + 0.43);
        if (us >= 0.07 && v <= quick) return k;
        if (k < 0.0 || (us < 0.013 && v > us)) continue;
        if (log(v * scale / (a / (us * us) + b)) <= -factorial_rest(k) - deviance(k, rate)) return k;
    }
}

/* log of the probability of k, up to what does not depend on it. */
INLINE f64 binomial_weight(f64 k, f64 n, f64 p)
{
    return -factorial_rest(k) - factorial_rest(n - k) - deviance(k, n * p) - deviance(n - k, n * (1.0 - p));
}

/* For 0 < p <= 1/2: by inversion below a mean of 10; else by transformed rejection, BTRS (Hörmann, 1993). */
FUNCTION f64 next_binomial(u64 *stream, f64 n, f64 p)
{
    f64 q = 1.0 - p;
    if (n * p < 10.0) {
        f64 u = next_uniform(stream), weight = exp(n * log1p(-p)), k = 0.0;
        for (; u > weight && k < n && weight > 1e-18; weight *= (n - k + 1.0) / k * (p / q))
            u -= weight, k += 1.0;
        return k;
    }
    f64 deviation = sqrt(n * p * q), b = 1.15 + 2.53 * deviation, a = -0.0873 + 0.0248 * b + 0.01 * p;
    f64 scale = (2.83 + 5.1 / b) * deviation, quick = 0.92 - 4.2 / b;
    f64 mode = binomial_weight(floor((n + 1.0) * p), n, p);
    for (;;) {
        f64 u = next_uniform(stream) - 0.5, v = next_uniform(stream), us = 0.5 - fabs(u);
        f64 k = floor((2.0 * a / us + b) * u + n * p + 0.5);
        if (us >= 0.07 && v <= quick) return k;
        if (k < 0.0 || k > n) continue;
        if (log(v * scale / (a / (us * us) + b)) <= binomial_weight(k, n, p) - mode) return k;
    }
}

FUNCTION f64 draw_binomial(u64 bits, f64 n, f64 p)
{
    if (!(n >= 0.0 && n < INFINITY && n == floor(n) && p >= 0.0 && p <= 1.0)) return NAN;
    if (n == 0.0 || p == 0.0) return 0.0;
    if (p == 1.0) return n;
    return p > 0.5 ? n - next_binomial(&bits, n, 1.0 - p) : next_binomial(&bits, n, p);
}
