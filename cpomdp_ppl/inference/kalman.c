/* A Kalman filter over rows: an episode under each of C contexts, from its start. All in float64.

   What comes before this text: the prelude; EXTENDED (1: functions have slopes; 0: they run at sigma points); the sizes
   C_ (contexts), A_ (actions), U_ (numbers of a continuous action, and then A_ = 1; else 0), D_ (numbers in a state), E0_ and E1_ (noise of the first state and of a move), M_ and NF_
   (values and flags of an observation); `flag_of`, the flag of every value; and the programs.

   A program writes its values at n points, each number of all points side by side. With slopes, there is one point, and
   after the values come the slopes of each. After those of an observation comes the covariance of its noise. */

typedef struct {
    i64 first, last, B, T, N;      /* the episodes to filter; episodes, steps, points of the reward */
    const i64 *actions, *lengths;  /* [B, T], [B] */
    const f64 *vectors;            /* [B, T, U]: continuous actions, in the place of `actions` */
    const f64 *values;             /* [B, T, M] */
    const u8 *flags;               /* [B, T, NF] */
    const f64 *first_values;       /* [B, M]; NULL if nothing is observed before the first action */
    const u8 *first_flags;         /* [B, NF] */
    const f64 *constants, *params;
    const void *const *tables;
    const f64 *points;             /* [D + noise of a reward, N]: points of a standard normal */
    /* Distance, weights in means and in covariances of the sigma points of a start, a move and an observation. */
    const f64 *sigma[3];
    f64 *room;                     /* [(D + 1) N + C (D + D D)] */
    f64 *increments, *first_increment, *rewards; /* [B, T, C], [B, C], [B, T, C] */
    f64 *mean, *variance;                        /* [B, T + 1, C, D], or NULL */
} Task;

enum { FAILED = 1 };
#if EXTENDED
enum { K0 = E0_, K1 = D_ + E1_, KM = D_, Y0 = D_ * (1 + E0_), Y1 = D_ * (1 + K1), YM = M_ * (1 + D_ + M_) };
#else
enum { K0 = 2 * E0_ + 1, K1 = 2 * (D_ + E1_) + 1, KM = 2 * D_ + 1, Y0 = D_ * K0, Y1 = D_ * K1, YM = M_ * (1 + M_) * KM };
#endif

typedef struct { f64 x[D_], L[D_][D_]; } Belief; /* N(x, L L') */

FUNCTION const Variant *variant(const Variant *all, int c, int a) { return all + (VARIANTS_ > 1 ? c * A_ + a : 0); }
FUNCTION const Variant *variant_of(const Variant *all, int c) { return all + (VARIANTS_ > 1 ? c : 0); }

/* What was done: the number of an action, or the numbers of a continuous one. */
typedef struct { int a; const f64 *reals; } Action;
static const Action NOTHING = {0, NULL};

FUNCTION Action action_at(const Task *task, i64 at)
{
    return U_ ? (Action){0, task->vectors + at * U_} : (Action){(int)task->actions[at], NULL};
}

FUNCTION int call(const Task *task, const Variant *v, int c, Action act, const f64 *val, const u8 *flag, const f64 *x,
                  const f64 *e, f64 *y, int n)
{
    return v->function(c, act.a, act.reals, task->constants + v->constants, task->params, task->tables, val, flag, x, e, y, n);
}

/* Some L with L L' = P, which may be singular: where no variance is left in a coordinate, its column is zero. */
INLINE void square_root(f64 P[D_][D_], f64 L[D_][D_])
{
    if (D_ == 1) {
        L[0][0] = P[0][0] < 0.0 ? 0.0 : sqrt(P[0][0]);
        return;
    }
    f64 nothing[D_];
    for (int j = 0; j < D_; j++) nothing[j] = 8 * D_ * 0x1p-52 * P[j][j];
    for (int j = 0; j < D_; j++) {
        f64 scale = P[j][j] <= nothing[j] ? 0.0 : 1.0 / sqrt(P[j][j]);
        for (int i = 0; i < D_; i++) L[i][j] = P[i][j] * scale;
        for (int i = 0; i < D_; i++)
            for (int k = 0; k < D_; k++) P[i][k] -= L[i][j] * L[k][j];
    }
}

/* The belief about a function of something Gaussian, from its deviations, weighted unless `weights` is NULL. */
INLINE void believe(Belief *belief, f64 (*out)[D_], const f64 *weights, int K)
{
    f64 P[D_][D_];
    for (int i = 0; i < D_; i++)
        for (int j = 0; j <= i; j++) {
            f64 sum = 0.0;
            for (int k = 0; k < K; k++) sum += (weights ? weights[k] * out[k][i] : out[k][i]) * out[k][j];
            P[i][j] = P[j][i] = sum;
        }
    square_root(P, belief->L);
}

#if !EXTENDED
/* Means of K values of each of `size` functions, and their deviations from these. */
INLINE void deviate(const f64 *y, int size, int K, const f64 *of_mean, f64 *mean, f64 *out, int stride)
{
    for (int i = 0; i < size; i++) {
        const f64 *v = y + i * K;
        f64 shift = 0.0;
        for (int k = 0; k < K; k++) shift += (v[k] - v[0]) * of_mean[k];
        mean[i] = v[0] + shift;
        for (int k = 0; k < K; k++) out[k * stride + i] = v[k] - v[0] - shift;
    }
}

/* Sigma points of a belief, [D, K], in which column j of its root moves points 1 + j and 1 + n + j. */
INLINE void spread(const Belief *belief, f64 distance, int n, f64 *x)
{
    int K = 2 * n + 1;
    for (int i = 0; i < D_; i++) {
        for (int k = 0; k < K; k++) x[i * K + k] = belief->x[i];
        for (int j = 0; j < D_; j++) {
            f64 arm = belief->L[i][j] * distance;
            x[i * K + 1 + j] = belief->x[i] + arm;
            x[i * K + 1 + n + j] = belief->x[i] - arm;
        }
    }
}
#endif

FUNCTION int start(const Task *task, int c, Belief *belief)
{
    f64 y[Y0], out[K0][D_];
    const Variant *v = variant_of(starts, c);
#if EXTENDED
    int bad = call(task, v, c, NOTHING, NULL, NULL, NULL, NULL, y, 1);
    for (int i = 0; i < D_; i++) {
        belief->x[i] = y[i];
        for (int k = 0; k < E0_; k++) out[k][i] = y[D_ + i * E0_ + k];
    }
    believe(belief, out, NULL, K0);
#else
    const f64 *of_mean = task->sigma[0] + 1;
    f64 e[E0_ * K0];
    memset(e, 0, sizeof e);
    for (int k = 0; k < E0_; k++) e[k * K0 + 1 + k] = *task->sigma[0], e[k * K0 + 1 + E0_ + k] = -*task->sigma[0];
    int bad = call(task, v, c, NOTHING, NULL, NULL, NULL, e, y, K0);
    deviate(y, D_, K0, of_mean, belief->x, out[0], D_);
    believe(belief, out, of_mean + K0, K0);
#endif
    return bad;
}

FUNCTION int move(const Task *task, int c, Action act, Belief *belief)
{
    f64 y[Y1], out[K1][D_];
    const Variant *v = variant(moves, c, act.a);
#if EXTENDED
    int bad = call(task, v, c, act, NULL, NULL, belief->x, NULL, y, 1);
    for (int i = 0; i < D_; i++) {
        const f64 *slopes = y + D_ + i * K1;
        for (int k = 0; k < D_; k++) {
            out[k][i] = 0.0;
            for (int j = 0; j < D_; j++) out[k][i] += slopes[j] * belief->L[j][k];
        }
        for (int k = D_; k < K1; k++) out[k][i] = slopes[k];
    }
    memcpy(belief->x, y, sizeof belief->x);
    believe(belief, out, NULL, K1);
#else
    enum { n = D_ + E1_ };
    const f64 *of_mean = task->sigma[1] + 1;
    f64 x[D_ * K1], e[E1_ * K1 + 1];
    spread(belief, *task->sigma[1], n, x);
    memset(e, 0, sizeof e);
    for (int k = 0; k < E1_; k++)
        e[k * K1 + 1 + D_ + k] = *task->sigma[1], e[k * K1 + 1 + n + D_ + k] = -*task->sigma[1];
    int bad = call(task, v, c, act, NULL, NULL, x, e, y, K1);
    deviate(y, D_, K1, of_mean, belief->x, out[0], D_);
    believe(belief, out, of_mean + K1, K1);
#endif
    return bad;
}

/* The mean of a reward over points that are spread out as a belief is, and as the noise on the way to where it is
   earned, if it takes any. */
FUNCTION int reward(const Task *task, int c, Action act, const Belief *belief, f64 *mean)
{
    const Variant *v = variant(rewards, c, act.a);
    int n = v->moves ? (int)task->N : 1;
    f64 *restrict x = task->room, *restrict y = x + (size_t)D_ * n, total = 0.0;
    const f64 *restrict p = task->points;
    for (int i = 0; v->moves && i < D_; i++) {
        f64 *restrict at = x + (size_t)i * n, center = belief->x[i], l = belief->L[i][0];
        for (int k = 0; k < n; k++) at[k] = l * p[k];
        for (int j = 1; j < D_; j++) {
            l = belief->L[i][j];
            for (int k = 0; k < n; k++) at[k] += l * p[(size_t)j * n + k];
        }
        for (int k = 0; k < n; k++) at[k] = center + at[k];
    }
    int bad = call(task, v, c, act, NULL, NULL, x, p + (size_t)D_ * n, y, n);
#pragma omp simd reduction(+ : total)
    for (int k = 0; k < n; k++) total += y[k];
    *mean = total / n;
    return bad;
}

/* What an observation is expected to be: of the m values that were seen, mean, deviations of state and values, and the
   covariance of noise. Returns how many there are, or -1. */
typedef struct { f64 z[M_], R[M_][M_], out[KM][M_], in[KM][D_]; int seen[M_]; } Expected;

INLINE int expect(const Task *task, const Variant *v, int c, Action act, const f64 *val, const u8 *flag, const Belief *belief,
                  Expected *expected)
{
    int m = 0, *seen = expected->seen;
    f64 y[YM];
    for (int i = 0; i < M_; i++)
        if (flag[flag_of[i]]) seen[m++] = i;
#if EXTENDED
    if (call(task, v, c, act, val, flag, belief->x, NULL, y, 1)) return -1;
    const f64 *R = y + M_ * (1 + D_);
    for (int i = 0; i < m; i++) {
        const f64 *slopes = y + M_ + seen[i] * D_;
        expected->z[i] = y[seen[i]];
        for (int k = 0; k < D_; k++) {
            expected->out[k][i] = 0.0;
            for (int j = 0; j < D_; j++) expected->out[k][i] += slopes[j] * belief->L[j][k];
        }
        for (int j = 0; j < m; j++) expected->R[i][j] = R[seen[i] * M_ + seen[j]];
    }
    for (int k = 0; k < D_; k++)
        for (int i = 0; i < D_; i++) expected->in[k][i] = belief->L[i][k];
#else
    const f64 distance = *task->sigma[2], *of_mean = task->sigma[2] + 1;
    f64 x[D_ * KM];
    spread(belief, distance, D_, x);
    if (call(task, v, c, act, val, flag, x, NULL, y, KM)) return -1;
    for (int i = 0; i < m; i++) {
        deviate(y + seen[i] * KM, 1, KM, of_mean, expected->z + i, expected->out[0] + i, M_);
        for (int j = 0; j < m; j++) {
            const f64 *R = y + (M_ + seen[i] * M_ + seen[j]) * KM;
            f64 sum = 0.0;
            for (int k = 0; k < KM; k++) sum += R[k] * of_mean[k];
            expected->R[i][j] = sum;
        }
    }
    for (int i = 0; i < D_; i++) {
        expected->in[0][i] = 0.0;
        for (int k = 0; k < D_; k++) {
            f64 arm = belief->L[i][k] * distance;
            expected->in[1 + k][i] = arm, expected->in[1 + D_ + k][i] = -arm;
        }
    }
#endif
    return m;
}

/* The lower factor of a positive definite matrix, in place; 0 if it is not. */
INLINE int factorise(f64 S[M_][M_], int m)
{
    for (int j = 0; j < m; j++) {
        for (int k = 0; k < j; k++) S[j][j] -= S[j][k] * S[j][k];
        if (!(S[j][j] > 0.0)) return 0;
        S[j][j] = sqrt(S[j][j]);
        for (int i = j + 1; i < m; i++) {
            for (int k = 0; k < j; k++) S[i][j] -= S[i][k] * S[j][k];
            S[i][j] /= S[j][j];
        }
    }
    return 1;
}

/* S^-1 v, given the factor of S; returns v' S^-1 v. */
INLINE f64 solve(f64 S[M_][M_], int m, f64 *v)
{
    f64 square = 0.0;
    for (int i = 0; i < m; i++) {
        for (int k = 0; k < i; k++) v[i] -= S[i][k] * v[k];
        v[i] /= S[i][i];
        square += v[i] * v[i];
    }
    for (int i = m - 1; i >= 0; i--) {
        for (int k = i + 1; k < m; k++) v[i] -= S[k][i] * v[k];
        v[i] /= S[i][i];
    }
    return square;
}

/* Condition on the values that were seen, and say how likely they were. */
FUNCTION int update(const Task *task, const Variant *v, int c, Action act, const f64 *val, const u8 *flag, Belief *belief,
                    f64 *increment)
{
    Expected expected;
    f64 S[M_][M_], gain[D_][M_], innovation[M_], left[KM][D_], P[D_][D_], distance, log_det = 0.0;
    const f64 *weights = EXTENDED ? NULL : task->sigma[2] + 1 + KM;
    int m = expect(task, v, c, act, val, flag, belief, &expected);
    if (m < 0) return FAILED;
    for (int i = 0; i < m; i++) {
        innovation[i] = val[expected.seen[i]] - expected.z[i];
        for (int j = 0; j < m; j++) {
            f64 sum = 0.0;
            for (int k = 0; k < KM; k++)
                sum += (weights ? weights[k] * expected.out[k][i] : expected.out[k][i]) * expected.out[k][j];
            S[i][j] = sum + expected.R[i][j];
        }
        for (int d = 0; d < D_; d++) {
            f64 sum = 0.0;
            for (int k = 0; k < KM; k++)
                sum += (weights ? weights[k] * expected.out[k][i] : expected.out[k][i]) * expected.in[k][d];
            gain[d][i] = sum;
        }
    }
    if (m == 1) {
        if (!(S[0][0] > 0.0)) return FAILED;
        for (int d = 0; d < D_; d++) gain[d][0] /= S[0][0];
        distance = innovation[0] * (innovation[0] / S[0][0]), log_det = log(S[0][0]);
    } else {
        if (!factorise(S, m)) return FAILED;
        f64 scores[M_];
        memcpy(scores, innovation, sizeof scores);
        distance = solve(S, m, scores);
        for (int i = 0; i < m; i++) log_det += 2.0 * log(S[i][i]);
        for (int d = 0; d < D_; d++) solve(S, m, gain[d]);
    }
    *increment = -0.5 * (distance + log_det + 1.8378770664093453 * m);
    for (int d = 0; d < D_; d++) {
        for (int i = 0; i < m; i++) belief->x[d] += gain[d][i] * innovation[i];
        for (int k = 0; k < KM; k++) {
            left[k][d] = expected.in[k][d];
            for (int i = 0; i < m; i++) left[k][d] -= expected.out[k][i] * gain[d][i];
        }
    }
    for (int d = 0; d < D_; d++) /* Joseph's form */
        for (int f = 0; f <= d; f++) {
            f64 sum = 0.0, noise = 0.0;
            for (int k = 0; k < KM; k++) sum += (weights ? weights[k] * left[k][d] : left[k][d]) * left[k][f];
            for (int i = 0; i < m; i++)
                for (int j = 0; j < m; j++) noise += gain[d][i] * expected.R[i][j] * gain[f][j];
            P[d][f] = P[f][d] = sum + noise;
        }
    square_root(P, belief->L);
    return 0;
}

/* Mean and variance of every number; returns whether they are finite. */
FUNCTION int write_moments(const Belief *belief, f64 *mean, f64 *variance)
{
    int finite = 1;
    for (int i = 0; i < D_; i++) {
        f64 sum = 0.0;
        for (int j = 0; j < D_; j++) sum += belief->L[i][j] * belief->L[i][j];
        mean[i] = belief->x[i], variance[i] = sum;
        finite &= isfinite(mean[i]) && isfinite(sum);
    }
    return finite;
}

FUNCTION int anything(const u8 *flag)
{
    int found = 0;
    for (int k = 0; k < NF_; k++) found |= flag[k];
    return found;
}

/* One row; returns 0 if all went well. */
FUNCTION int filter_row(const Task *task, i64 b, int c, Belief belief)
{
    i64 T = task->T, length = task->lengths[b];
    f64 *first = task->first_increment + b * C_ + c;
    *first = 0.0;
    if (task->first_values && anything(task->first_flags + b * NF_)) {
        const f64 *val = task->first_values + b * M_;
        if (update(task, variant_of(first_sights, c), c, NOTHING, val, task->first_flags + b * NF_, &belief, first))
            return FAILED;
    }
    int finite = isfinite(*first);
    for (i64 t = 0; t <= T; t++) {
        if (t > 0 && t <= length) {
            i64 at = b * T + t - 1, row = at * C_ + c;
            Action act = action_at(task, at);
            f64 increment = 0.0;
            if (reward(task, c, act, &belief, task->rewards + row) || move(task, c, act, &belief)) return FAILED;
            const u8 *flag = task->flags + at * NF_;
            if (anything(flag))
                if (update(task, variant(sights, c, act.a), c, act, task->values + at * M_, flag, &belief, &increment))
                    return FAILED;
            task->increments[row] = increment;
            finite &= isfinite(increment) && isfinite(task->rewards[row]);
        } else if (t > 0) {
            task->increments[(b * T + t - 1) * C_ + c] = task->rewards[(b * T + t - 1) * C_ + c] = 0.0;
        }
        i64 moment = ((b * (T + 1) + t) * C_ + c) * D_;
        if (task->mean) finite &= write_moments(&belief, task->mean + moment, task->variance + moment);
    }
    return finite ? 0 : FAILED;
}

/* Filter some episodes. Returns 0 unless something failed or is not finite. */
int filter_rows(const Task *task)
{
    f64 *beginnings = task->room + (size_t)(D_ + 1) * task->N;
    Belief *beliefs = (Belief *)beginnings;
    for (int c = 0; c < C_; c++)
        if (start(task, c, beliefs + c)) return FAILED;
    for (i64 b = task->first; b < task->last; b++)
        for (int c = 0; c < C_; c++)
            if (filter_row(task, b, c, beliefs[c])) return FAILED;
    return 0;
}
