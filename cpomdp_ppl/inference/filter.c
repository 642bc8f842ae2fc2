/* A particle filter over rows: an episode under each of C contexts, from its start, or by single steps.

   What comes before this text: the prelude and programs.h; `real`, the type of weights, `score`, that of log-densities,
   and S(f), a function of the prelude of the latter. The programs of a model are in a library of their own. */

#include <stdlib.h>

enum { RESAMPLE = 1, MOVE = 2, WEIGH = 4, REWARD = 8 };
enum { SYSTEMATIC, STRATIFIED, MULTINOMIAL, RESIDUAL };
enum { CHECK_FAILED = 1, MASKED = 2, NOT_COMPILED = 4, OUT_OF_MEMORY = 8, OUT_OF_BOUNDS = 16, OUT_OF_ORDER = 32 };
enum { OF_RESAMPLING, OF_MOVE, OF_OBSERVATION, OF_START, OF_REWARD, OF_PICK }; /* purposes of random numbers */

typedef struct {
    i64 first, last;               /* the episodes to filter */
    i64 B, T, N;                   /* episodes, steps, particles */
    i64 parts, scheme, common;     /* what a step consists of; how to resample; whether contexts share noise */
    i64 tries;                     /* how many next states each particle tries out */
    f64 threshold;                 /* resample if the effective sample size is below this share of N */
    const u64 *keys;               /* [T + 2]: of the start, of the first observation, of every step */
    const i64 *actions, *lengths;  /* [B, T], [B] */
    const f64 *vectors;            /* [B, T, reals]: continuous actions, in the place of `actions` */
    const f64 *values;             /* [B, T, NV]: float64, or int64 in its place */
    const u8 *flags;               /* [B, T, NF] */
    const f64 *first_values;       /* [B, NV]; NULL if nothing is observed before the first action */
    const u8 *first_flags;         /* [B, NF] */
    const f64 *constants, *params;
    const void *const *tables;
    f64 *increments, *first_increment;        /* [B, T, C], [B, C] */
    real *rewards, *ess, *error;              /* [B, T, C], [B, T, C], [B, C] */
    u8 *resampled;                            /* [B, T, C] */
    real *mean, *variance;                    /* [B, T + 1, C, D], or NULL */
    /* A cloud to go on from, and one to end with, or NULL; every number of the state by its place and stride. */
    const void *const *state_in; void *const *state_out; const i64 *strides;
    const real *weights_in; real *weights_out;    /* [C, B, N] */
    const i32 *founders_in; i32 *founders_out;    /* [C, B, N] */
    const real *noise_in; real *noise_out;        /* [C, B] */
    const real *ess_in; real *ess_out;            /* [C, B] */
    i32 *ancestors;                               /* [C, B, N], or NULL */
} Task;

typedef struct {
    void **x, **y;       /* particles, and room for the next */
    real *w;             /* normalised weights */
    /* Particles that descend from one of time 0 are a family, and stand side by side: resampling keeps their order.
       Of each, which particle that was, and where the family ends. */
    i32 *founders, *ends, families;
    void **kept;         /* of the next states that were tried out so far, the one that is kept, */
    score *total;        /* and the log of the sum of all their densities */
    f64 ess, noise;      /* effective sample size; squared changes of families' shares by resampling */
    int even;            /* whether all weights are the same */
} Cloud;

typedef struct {
    const Programs *p;
    Cloud *clouds;
    void **noise, **tried;
    u32 *scratch;
    i32 *ancestors, *offspring; /* of every particle: its ancestor; how many come from it and those before */
    real *buffer;
    score *scores;
    f64 *uniforms, *cumulative;
    char *memory;
} Room;

FUNCTION size_t size_of(int type) { return type == F64 || type == I64 ? 8 : 4; }

FUNCTION void *piece(char **at, size_t bytes)
{
    void *found = *at;
    *at += (bytes + 127) / 64 * 64;
    return found;
}

FUNCTION int make_room(Room *room, const Programs *p, int N, int tries)
{
    size_t n = (size_t)padded(N) + 32, each = 8 * n + 128, D = (size_t)p->D, C = (size_t)p->C, E = (size_t)p->E;
    size_t more = tries > 1 ? D + 1 : 0;
    size_t of_cloud = sizeof(Cloud) + 3 * D * sizeof(void *) + 768 + (2 * D + 3 + more) * each;
    size_t bytes = C * of_cloud + E * (sizeof(void *) + each) + D * sizeof(void *) + 7 * each + 4096;
    room->p = p;
    room->memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!room->memory) return OUT_OF_MEMORY;
    char *at = room->memory;
    room->clouds = piece(&at, C * sizeof(Cloud)), room->noise = piece(&at, E * sizeof(void *));
    room->tried = piece(&at, D * sizeof(void *));
    for (size_t c = 0; c < C; c++) {
        Cloud *cloud = &room->clouds[c];
        cloud->x = piece(&at, D * sizeof(void *)), cloud->y = piece(&at, D * sizeof(void *));
        for (size_t k = 0; k < D; k++) {
            size_t size = size_of(p->type[k]) * n;
            cloud->x[k] = piece(&at, size), cloud->y[k] = piece(&at, size);
        }
        if (tries > 1) {
            cloud->kept = piece(&at, D * sizeof(void *)), cloud->total = piece(&at, sizeof(score) * n);
            for (size_t k = 0; k < D; k++) cloud->kept[k] = piece(&at, size_of(p->type[k]) * n);
        }
        cloud->w = piece(&at, sizeof(real) * n);
        cloud->founders = piece(&at, 4 * n), cloud->ends = piece(&at, 4 * n);
    }
    for (size_t k = 0; k < E; k++) room->noise[k] = piece(&at, 8 * n);
    room->scratch = piece(&at, 4 * n), room->ancestors = piece(&at, 4 * n), room->offspring = piece(&at, 4 * n);
    room->buffer = piece(&at, sizeof(real) * n), room->scores = piece(&at, sizeof(score) * n);
    room->uniforms = piece(&at, 8 * n), room->cumulative = piece(&at, 8 * n);
    return 0;
}

/* Whether a program takes random numbers: if not, not even their key is worth its time. */
FUNCTION int draws(const Room *room, const Program *program, int a)
{
    int needed = 0;
    for (int k = 0; k < room->p->E; k++) needed |= program->needed[(size_t)a * room->p->E + k];
    return needed;
}

FUNCTION void draw_noise(Room *room, const Program *program, int a, u64 key, int N)
{
    const u8 *needed = program->needed + (size_t)a * room->p->E;
    Rng rng;
    int begun = 0;
    for (int k = 0; k < room->p->E; k++) {
        if (!needed[k]) continue;
        if (!begun) rng_begin(&rng, key), begun = 1;
        switch (program->noise[k]) {
        case NORMAL: fill_normal(&rng, room->noise[k], room->scratch, N); break;
        case UNIFORM: fill_uniform(&rng, room->noise[k], room->scratch, N); break;
        case NORMAL_D: fill_normal_d(&rng, room->noise[k], room->scratch, N); break;
        case UNIFORM_D: fill_uniform_d(&rng, room->noise[k], room->scratch, N); break;
        default: fill_bits(&rng, room->noise[k], room->scratch, N);
        }
    }
}

FUNCTION void make_even(Cloud *cloud, int N)
{
    for (int i = 0; i < N; i++) cloud->w[i] = (real)(1.0 / N);
    cloud->ess = N, cloud->even = 1;
}

/* Sums in blocks, so that many particles cost no digits. */
enum { BLOCK = 512 };

FUNCTION f64 weighted_mean(const real *restrict w, const real *restrict v, int N)
{
    f64 total = 0;
    for (int from = 0; from < N; from += BLOCK) {
        int to = from + BLOCK < N ? from + BLOCK : N;
        real part = 0;
#pragma omp simd reduction(+ : part)
        for (int i = from; i < to; i++) part += w[i] * v[i];
        total += part;
    }
    return total;
}

FUNCTION void as_reals(const void *x, int type, real *restrict out, int N)
{
    switch (type) {
    case F32: for (int i = 0; i < N; i++) out[i] = (real)((const f32 *)x)[i]; break;
    case F64: for (int i = 0; i < N; i++) out[i] = (real)((const f64 *)x)[i]; break;
    case I32: for (int i = 0; i < N; i++) out[i] = (real)((const i32 *)x)[i]; break;
    default: for (int i = 0; i < N; i++) out[i] = (real)((const i64 *)x)[i];
    }
}

FUNCTION void write_moments(Room *room, const Cloud *cloud, real *mean, real *variance, int N)
{
    for (int k = 0; k < room->p->D; k++) {
        real *v = room->buffer;
        as_reals(cloud->x[k], room->p->type[k], v, N);
        real m = (real)weighted_mean(cloud->w, v, N);
        for (int i = 0; i < N; i++) v[i] = (v[i] - m) * (v[i] - m);
        mean[k] = m, variance[k] = (real)weighted_mean(cloud->w, v, N);
    }
}

/* ------------------------------------------------------------------------------------------------ resampling */

/* The first index whose cumulative weight is above a level; the last, if none is. */
FUNCTION int index_above(const f64 *cumulative, f64 level, int N)
{
    int low = 0, high = N - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (cumulative[middle] > level) high = middle; else low = middle + 1;
    }
    return low;
}

/* How many offspring particles have, summed up, from independent or stratified draws. */
FUNCTION void choose_by_counts(Room *room, const real *w, u64 key, int scheme, int N)
{
    f64 *levels = room->cumulative, *uniforms = room->uniforms, total = 0;
    i32 *counts = room->offspring, drawn = N;
    Rng rng;
    rng_begin(&rng, key);
    fill_uniform_d(&rng, uniforms, room->scratch, N);
    for (int i = 0; i < N; i++) {
        f64 expected = scheme == RESIDUAL ? N * (f64)w[i] : w[i], certain = scheme == RESIDUAL ? floor(expected) : 0;
        counts[i] = (i32)certain, drawn -= counts[i];
        total += expected - certain, levels[i] = total;
    }
    if (!(total > 0)) for (int i = 0; i < N; i++) total += 1, levels[i] = total; /* all are multiples of 1 / N */
    for (int i = 0; i < drawn; i++) {
        f64 level = scheme == STRATIFIED ? (i + uniforms[i]) / N : uniforms[i];
        counts[index_above(levels, level * total, N)]++;
    }
    for (int i = 1; i < N; i++) counts[i] += counts[i - 1];
}

/* Of points (i + u) / N, a particle has those between the cumulative weights before it and its own. */
FUNCTION void choose_systematically(Room *room, u64 key, int N)
{
    f64 scale = N / room->cumulative[N - 1], u = uniform_of(key);
    for (int i = 0; i < N; i++) {
        i32 offspring = (i32)(room->cumulative[i] * scale + u);
        room->offspring[i] = offspring < N ? offspring : N;
    }
}

FUNCTION void accumulate(Room *room, const real *w, int N)
{
    f64 total = 0;
    for (int i = 0; i < N; i++) total += w[i], room->cumulative[i] = total;
}

FUNCTION void find_ancestors(Room *room, int N)
{
    i32 *ancestors = room->ancestors, *offspring = room->offspring, before = 0, latest = 0;
    memset(ancestors, 0, 4 * (size_t)(N + 1));
    offspring[N - 1] = N;
    for (int i = 0; i < N; i++) ancestors[before] = i, before = offspring[i]; /* the last to write there is right */
    for (int i = 0; i < N; i++) latest = ancestors[i] > latest ? ancestors[i] : latest, ancestors[i] = latest;
}

/* Families after resampling, and the squared changes of their shares. */
FUNCTION void update_families(Room *room, Cloud *cloud, int N)
{
    const f64 *cumulative = room->cumulative;
    f64 scale = 1.0 / cumulative[N - 1], even = 1.0 / N, share_before = 0, squares = 0;
    i32 end_before = 0, left = 0;
    for (int f = 0; f < cloud->families; f++) {
        f64 share = cumulative[cloud->ends[f] - 1] * scale;
        i32 end = room->offspring[cloud->ends[f] - 1];
        f64 change = share - share_before - (f64)(end - end_before) * even;
        squares += change * change;
        cloud->founders[left] = cloud->founders[f], cloud->ends[left] = end; /* overwritten if nobody is left of it */
        left += end > end_before;
        share_before = share, end_before = end;
    }
    cloud->families = left, cloud->noise += squares;
}

#define TAKE(T) \
    do { T *restrict y = out; const T *restrict x = in; for (int i = 0; i < N; i++) y[i] = x[at[i]]; } while (0)
FUNCTION void take(void *out, const void *in, const i32 *restrict at, size_t size, int N)
{
    if (size == 8) TAKE(u64); else TAKE(u32);
}

#define SWAP(T, a, b) do { T swapped = a; a = b; b = swapped; } while (0)

FUNCTION void resample(Room *room, Cloud *cloud, u64 key, int scheme, int N)
{
    if (scheme != SYSTEMATIC) choose_by_counts(room, cloud->w, key, scheme, N);
    accumulate(room, cloud->w, N);
    if (scheme == SYSTEMATIC) choose_systematically(room, key, N);
    find_ancestors(room, N);
    update_families(room, cloud, N);
    for (int k = 0; k < room->p->D; k++) {
        take(cloud->y[k], cloud->x[k], room->ancestors, size_of(room->p->type[k]), N);
        SWAP(void *, cloud->x[k], cloud->y[k]);
    }
    make_even(cloud, N);
}

/* The jackknife over families of particles, less what resampling added. */
FUNCTION f64 standard_error(Room *room, const Cloud *cloud, int N)
{
    int F = cloud->families;
    f64 *shares = room->uniforms, sum = 0, squares = 0;
    f32 *restrict left_out = (f32 *)room->buffer;
    accumulate(room, cloud->w, N);
    f64 scale = 1.0 / room->cumulative[N - 1], before = 0;
    for (int f = 0; f < F; f++) {
        f64 until = room->cumulative[cloud->ends[f] - 1];
        shares[f] = F == 1 ? 1.0 : (until - before) * scale, before = until;
    }
    for (int f = 0; f < F; f++) left_out[f] = m_log1p(-(f32)shares[f]);
    for (int f = 0; f < F; f++) sum += shares[f] = shares[f] > 0.5 ? log1p(-shares[f]) : left_out[f];
    f64 mean = sum / N;
#pragma omp simd reduction(+ : squares)
    for (int f = 0; f < F; f++) squares += (shares[f] - mean) * (shares[f] - mean);
    f64 variance = (squares + (N - F) * mean * mean) / N * (N - 1), least = sqrt(2.0 / N) * cloud->noise;
    if (variance != variance) return INFINITY; /* a single family has all the weight */
    return sqrt(variance - cloud->noise > least ? variance - cloud->noise : least);
}

/* ------------------------------------------------------------------------------------------------ one row */

FUNCTION void begin_families(Cloud *cloud, int N)
{
    make_even(cloud, N);
    for (int i = 0; i < N; i++) cloud->founders[i] = i, cloud->ends[i] = i + 1;
    cloud->families = N, cloud->noise = 0;
}

/* The variant of a program under a context and action. */
FUNCTION const Variant *variant(const Room *room, const Program *program, int c, int a)
{
    return &program->variants[room->p->specialised ? c * room->p->A + a : 0];
}

/* What was done: the number of an action, or the numbers of a continuous one. */
typedef struct { int a; const f64 *reals; } Action;
static const Action NOTHING = {0, NULL};

FUNCTION Action action_at(const Task *task, const Programs *p, size_t row)
{
    if (p->reals) return (Action){0, task->vectors + row * (size_t)p->reals};
    return (Action){(int)task->actions[row], NULL};
}

FUNCTION int run(const Task *task, const Variant *v, int c, Action act, const f64 *values, const u8 *flags,
                 void *const *x, void *const *noise, void *const *y)
{
    const f64 *constants = task->constants + v->constants;
    return v->function(c, act.a, act.reals, constants, task->params, task->tables, values, flags, x, noise, y, (int)task->N);
}

FUNCTION int start(Room *room, const Task *task, Cloud *cloud, int c, u64 key)
{
    int N = (int)task->N;
    const Program *program = &room->p->start;
    if (!task->common || c == 0) draw_noise(room, program, 0, key_of(key, OF_START, task->common ? 0 : c + 1, 0), N);
    begin_families(cloud, N);
    const Variant *v = variant(room, program, c, 0);
    return run(task, v, c, NOTHING, NULL, NULL, cloud->y, room->noise, cloud->x);
}

FUNCTION int move(Room *room, const Task *task, Cloud *cloud, int c, Action act)
{
    const Variant *v = variant(room, &room->p->move, c, act.a);
    if (!v->function) return 0;
    int status = run(task, v, c, act, NULL, NULL, cloud->x, room->noise, cloud->y);
    for (int k = 0; k < room->p->D; k++) if (v->written[k]) SWAP(void *, cloud->x[k], cloud->y[k]);
    return status;
}

/* Multiply weights by densities, whose logarithms are in `scores`, and normalise. Returns the log of their mean. */
FUNCTION f64 reweigh(Room *room, Cloud *cloud, int N)
{
    int nan = 0;
    score *restrict log_w = room->scores, highest = -INFINITY;
    real *restrict w = cloud->w;
    if (cloud->even) {
        score lowest = INFINITY;
#pragma omp simd reduction(max : highest) reduction(min : lowest) reduction(| : nan)
        for (int i = 0; i < N; i++) {
            score v = log_w[i];
            nan |= v != v, highest = v > highest ? v : highest, lowest = v < lowest ? v : lowest;
        }
        if (!nan && highest == lowest && highest < INFINITY) return highest; /* nothing is learned */
    } else {
#pragma omp simd reduction(max : highest) reduction(| : nan)
        for (int i = 0; i < N; i++) {
            score v = log_w[i] += S(log)((score)w[i]);
            nan |= v != v, highest = v > highest ? v : highest;
        }
    }
    if (nan || highest == INFINITY) return NAN;
    if (highest == -INFINITY) return -INFINITY;
    f64 total = 0, squares = 0;
    for (int from = 0; from < N; from += BLOCK) {
        int to = from + BLOCK < N ? from + BLOCK : N;
        score sum = 0, square = 0;
#pragma omp simd reduction(+ : sum, square)
        for (int i = from; i < to; i++) {
            score v = S(exp)(log_w[i] - highest);
            w[i] = (real)v, sum += v, square += v * v;
        }
        total += sum, squares += square;
    }
    real scale = (real)(1.0 / total);
    for (int i = 0; i < N; i++) w[i] *= scale;
    f64 log_mean = (f64)highest + log(total) - (cloud->even ? log((f64)N) : 0.0);
    cloud->ess = total * total / squares, cloud->even = 0;
    return log_mean;
}

FUNCTION int weigh(Room *room, const Task *task, Cloud *cloud, const Variant *v, int c, Action act,
                   const f64 *values, const u8 *flags, f64 *increment)
{
    void *out[1] = {room->scores};
    if (!v->function) return NOT_COMPILED;
    int status = run(task, v, c, act, values, flags, cloud->x, room->noise, out);
    if (status) return status;
    unsigned before = denormals_off(); /* of weights; a program may count on them */
    *increment = reweigh(room, cloud, (int)task->N);
    denormals_back(before);
    return 0;
}

/* The program that scores what was observed; NULL if nothing was. */
FUNCTION const Program *scoring(const Programs *p, int first, const u8 *flags)
{
    int seen = 0, complete = 1;
    for (int k = 0; k < p->flags; k++) seen |= flags[k];
    if (!seen) return NULL;
    for (int k = 0; k < p->num_parents; k++) complete &= flags[p->parents[k]];
    return complete ? (first ? &p->first_score : &p->score)
                    : (first ? &p->first_partial_score : &p->partial_score);
}

FUNCTION int observe(Room *room, const Task *task, int first, Action act, u64 key,
                     const f64 *values, const u8 *flags, f64 *increments)
{
    const Programs *p = room->p;
    const Program *program = scoring(p, first, flags);
    int N = (int)task->N, status = 0;
    for (int c = 0; c < p->C; c++) increments[c] = 0;
    if (!program) return 0;
    int noisy = draws(room, program, act.a);
    for (int c = 0; c < p->C && !status; c++) {
        u64 of_context = task->common ? 0 : (u64)c + 1;
        if (noisy && (!task->common || c == 0))
            draw_noise(room, program, act.a, key_of(key, OF_OBSERVATION, of_context, 0), N);
        const Variant *v = variant(room, program, c, act.a);
        status = weigh(room, task, &room->clouds[c], v, c, act, values, flags, &increments[c]);
    }
    return status;
}

#define BLEND(T) \
    do { \
        T *restrict old = kept; \
        const T *restrict new = tried; \
        for (int i = 0; i < N; i++) old[i] = takes[i] ? new[i] : old[i]; \
    } while (0)
FUNCTION void blend(void *kept, const void *tried, const i32 *restrict takes, size_t size, int N)
{
    if (size == 8) BLEND(u64); else BLEND(u32);
}

/* Keep one of the next states that were tried out so far: the newest, by its share in the sum of all densities. */
FUNCTION void keep(Room *room, Cloud *cloud, int newest, int N)
{
    score *restrict total = cloud->total;
    const score *restrict now = room->scores;
    const f64 *restrict level = room->uniforms;
    i32 *restrict takes = room->offspring;
    for (int i = 0; i < N; i++) {
        score before = newest ? total[i] : -(score)INFINITY, s = now[i], high = before > s ? before : s;
        score sum = high + S(log)(S(exp)(before - high) + S(exp)(s - high));
        total[i] = high == -INFINITY ? high : sum;
        takes[i] = newest == 0 || level[i] < S(exp)(s - sum);
    }
    for (int k = 0; k < room->p->D; k++) blend(cloud->kept[k], room->tried[k], takes, size_of(room->p->type[k]), N);
}

FUNCTION int move_and_score(Room *room, const Task *task, const Program *sight, Action act, u64 key, int newest,
                            const f64 *values, const u8 *flags)
{
    const Programs *p = room->p;
    int N = (int)task->N, status = 0;
    void *out[1] = {room->scores};
    for (int c = 0; c < p->C && !status; c++) {
        const Variant *v = variant(room, &p->move, c, act.a);
        u64 of_context = task->common ? 0 : (u64)c + 1;
        if (!task->common || c == 0) draw_noise(room, &p->move, act.a, key_of(key, OF_MOVE, of_context, (u64)newest), N);
        if (v->function) status = run(task, v, c, act, NULL, NULL, room->clouds[c].x, room->noise, room->clouds[c].y);
    }
    for (int c = 0; c < p->C && !status; c++) {
        Cloud *cloud = &room->clouds[c];
        const Variant *moved = variant(room, &p->move, c, act.a), *v = variant(room, sight, c, act.a);
        u64 of_context = task->common ? 0 : (u64)c + 1;
        if (!task->common || c == 0) {
            Rng rng;
            draw_noise(room, sight, act.a, key_of(key, OF_OBSERVATION, of_context, (u64)newest), N);
            rng_begin(&rng, key_of(key, OF_PICK, of_context, (u64)newest));
            fill_uniform_d(&rng, room->uniforms, room->scratch, N);
        }
        if (!v->function) return NOT_COMPILED;
        for (int k = 0; k < p->D; k++)
            room->tried[k] = moved->function && moved->written[k] ? cloud->y[k] : cloud->x[k];
        status = run(task, v, c, act, values, flags, room->tried, room->noise, out);
        if (!status) keep(room, cloud, newest, N);
    }
    return status;
}

/* Move each particle to one of several next states, picked in proportion to the density of what was observed there;
   the mean of the densities is its weight. */
FUNCTION int try_out(Room *room, const Task *task, const Program *sight, Action act, u64 key,
                     const f64 *values, const u8 *flags, f64 *increments)
{
    int N = (int)task->N, status = 0;
    score fewer = (score)log((f64)task->tries);
    for (int k = 0; k < task->tries && !status; k++)
        status = move_and_score(room, task, sight, act, key, k, values, flags);
    for (int c = 0; c < room->p->C && !status; c++) {
        Cloud *cloud = &room->clouds[c];
        for (int k = 0; k < room->p->D; k++) SWAP(void *, cloud->x[k], cloud->kept[k]);
        for (int i = 0; i < N; i++) room->scores[i] = cloud->total[i] - fewer;
        unsigned before = denormals_off();
        increments[c] = reweigh(room, cloud, N);
        denormals_back(before);
    }
    return status;
}

/* Under every context. A reward on arrival takes random numbers: those of the transition to where it is earned. */
FUNCTION int expected_rewards(Room *room, const Task *task, Action act, u64 key, real *rewards)
{
    void *out[1] = {room->buffer};
    const Program *program = &room->p->reward;
    int N = (int)task->N, status = 0, noisy = draws(room, program, act.a);
    for (int c = 0; c < room->p->C && !status; c++) {
        const Cloud *cloud = &room->clouds[c];
        u64 of_context = task->common ? 0 : (u64)c + 1;
        if (noisy && (!task->common || c == 0))
            draw_noise(room, program, act.a, key_of(key, OF_REWARD, of_context, 0), N);
        status = run(task, variant(room, program, c, act.a), c, act, NULL, NULL, cloud->x, room->noise, out);
        rewards[c] = (real)weighted_mean(cloud->w, room->buffer, N);
    }
    return status;
}

/* Who descends from whom; without ancestors, everybody from themselves. */
FUNCTION void write_ancestors(const i32 *ancestors, const Task *task, int c, i64 b)
{
    i32 *out = task->ancestors + ((size_t)c * task->B + b) * task->N;
    for (int i = 0; i < task->N; i++) out[i] = ancestors ? ancestors[i] : i;
}

/* Resample, move, reweight. */
FUNCTION int step(Room *room, const Task *task, i64 b, i64 t, u64 key)
{
    const Programs *p = room->p;
    int N = (int)task->N, C = p->C, status = 0;
    f64 low = task->threshold * N * (1 - 1e-6);
    size_t row = (size_t)(b * task->T + t);
    Action act = action_at(task, p, row);
    const f64 *values = task->values ? task->values + row * p->values : NULL;
    const u8 *flags = task->flags ? task->flags + row * p->flags : NULL;
    int both = (task->parts & MOVE) && (task->parts & WEIGH);
    const Program *sight = both && task->tries > 1 ? scoring(p, 0, flags) : NULL;
    if (task->parts & REWARD) status = expected_rewards(room, task, act, key, task->rewards + row * C);
    for (int c = 0; c < C && !status; c++) {
        Cloud *cloud = &room->clouds[c];
        u64 of_context = task->common ? 0 : (u64)c + 1;
        int needed = (task->parts & RESAMPLE) && cloud->ess < low;
        if (needed) resample(room, cloud, key_of(key, OF_RESAMPLING, of_context, 0), (int)task->scheme, N);
        if (task->ancestors) write_ancestors(needed ? room->ancestors : NULL, task, c, b);
        if (task->resampled) task->resampled[row * C + c] = (u8)needed;
        if (!(task->parts & MOVE) || sight) continue;
        if (!task->common || c == 0) draw_noise(room, &p->move, act.a, key_of(key, OF_MOVE, of_context, 0), N);
        status |= move(room, task, cloud, c, act);
    }
    if (status || !(task->parts & WEIGH)) return status;
    if (sight) return try_out(room, task, sight, act, key, values, flags, task->increments + row * C);
    return observe(room, task, 0, act, key, values, flags, task->increments + row * C);
}

/* -------------------------------------------------------------------------------- clouds in and out */

#define PLACE (((size_t)row * N + i) * stride)
#define LOAD(T, S) for (int i = 0; i < N; i++) ((T *)cloud->x[k])[i] = (T)((const S *)from)[PLACE]
#define CHECK(S) \
    for (int i = 0; i < N; i++) bad |= ((const S *)from)[PLACE] < p->low[k] || ((const S *)from)[PLACE] > p->high[k]
#define STORE(T, S) for (int i = 0; i < N; i++) ((S *)to)[PLACE] = (S)((const T *)cloud->x[k])[i]

FUNCTION int load(const Task *task, const Programs *p, Cloud *cloud, i64 row)
{
    int N = (int)task->N, bad = 0;
    for (int k = 0; k < p->D; k++) {
        const void *from = task->state_in[k];
        i64 stride = task->strides[k];
        switch (p->given[k]) {
        case GIVEN_F32: LOAD(f32, f32); break;
        case GIVEN_F64: LOAD(f64, f64); break;
        case GIVEN_BOOL: LOAD(i32, u8); break;
        case GIVEN_I32: LOAD(i32, i32); break;
        default: if (p->type[k] == I64) LOAD(i64, i64); else LOAD(i32, i64);
        }
        if (p->given[k] == GIVEN_I32) CHECK(i32);
        if (p->given[k] == GIVEN_I64) CHECK(i64);
    }
    if (task->weights_in) {
        memcpy(cloud->w, task->weights_in + row * N, sizeof(real) * N);
        const i32 *founders = task->founders_in + row * N;
        cloud->families = 0;
        for (int i = 0; i < N; i++) {
            if (i && founders[i] < founders[i - 1]) return OUT_OF_ORDER;
            if (i + 1 == N || founders[i + 1] != founders[i])
                cloud->founders[cloud->families] = founders[i], cloud->ends[cloud->families++] = i + 1;
        }
        cloud->noise = task->noise_in[row], cloud->ess = task->ess_in[row], cloud->even = 1;
        for (int i = 1; i < N; i++) cloud->even &= cloud->w[i] == cloud->w[0];
    } else {
        begin_families(cloud, N);
    }
    return bad ? OUT_OF_BOUNDS : 0;
}

FUNCTION void store(const Task *task, const Programs *p, const Cloud *cloud, i64 row)
{
    int N = (int)task->N;
    for (int k = 0; k < p->D; k++) {
        void *to = task->state_out[k];
        i64 stride = task->strides[k];
        switch (p->given[k]) {
        case GIVEN_F32: STORE(f32, f32); break;
        case GIVEN_F64: STORE(f64, f64); break;
        case GIVEN_BOOL: STORE(i32, u8); break;
        case GIVEN_I32: STORE(i32, i32); break;
        default: if (p->type[k] == I64) STORE(i64, i64); else STORE(i32, i64);
        }
    }
    if (task->weights_out) {
        memcpy(task->weights_out + row * N, cloud->w, sizeof(real) * N);
        i32 *founders = task->founders_out + row * N, at = 0;
        for (int f = 0; f < cloud->families; f++) while (at < cloud->ends[f]) founders[at++] = cloud->founders[f];
        task->noise_out[row] = (real)cloud->noise, task->ess_out[row] = (real)cloud->ess;
    }
}

/* ------------------------------------------------------------------------------------------------ an episode */

FUNCTION void write_step(Room *room, const Task *task, i64 b, i64 t)
{
    int C = room->p->C, D = room->p->D;
    for (int c = 0; c < C; c++) {
        if (task->ess && t >= 0) task->ess[(b * task->T + t) * C + c] = (real)room->clouds[c].ess;
        size_t at = ((size_t)(b * (task->T + 1) + t + 1) * C + c) * D;
        if (task->mean) write_moments(room, &room->clouds[c], task->mean + at, task->variance + at, (int)task->N);
    }
}

FUNCTION void write_after_end(Room *room, const Task *task, i64 b, i64 t)
{
    int C = room->p->C, D = room->p->D;
    for (int c = 0; c < C; c++) {
        size_t row = (size_t)(b * task->T + t) * C + c;
        if (task->increments) task->increments[row] = 0;
        if (task->rewards) task->rewards[row] = 0;
        if (task->resampled) task->resampled[row] = 0;
        if (task->ancestors) write_ancestors(NULL, task, c, b);
        if (task->ess) task->ess[row] = (real)room->clouds[c].ess;
        if (!task->mean) continue;
        real *mean = task->mean + ((size_t)(b * (task->T + 1) + t + 1) * C + c) * D;
        real *variance = task->variance + (mean - task->mean);
        memcpy(mean, mean - C * D, sizeof(real) * D), memcpy(variance, variance - C * D, sizeof(real) * D);
    }
}

FUNCTION int filter_episode(Room *room, const Task *task, i64 b)
{
    int C = room->p->C, status = 0;
    u64 episode = (u64)b;
    for (int c = 0; c < C && !status; c++)
        status = task->state_in ? load(task, room->p, &room->clouds[c], c * task->B + b)
                                : start(room, task, &room->clouds[c], c, key_of(task->keys[0], episode, 0, 0));
    if (!status && task->first_values)
        status = observe(room, task, 1, NOTHING, key_of(task->keys[1], episode, 0, 0),
                         task->first_values + b * room->p->values, task->first_flags + b * room->p->flags, task->first_increment + b * C);
    if (status) return status;
    write_step(room, task, b, -1);
    for (i64 t = 0; t < task->T && !status; t++) {
        if (t >= task->lengths[b]) { write_after_end(room, task, b, t); continue; }
        status = step(room, task, b, t, key_of(task->keys[t + 2], episode, 0, 0));
        write_step(room, task, b, t);
    }
    for (int c = 0; c < C; c++) {
        if (task->error) task->error[b * C + c] = (real)standard_error(room, &room->clouds[c], (int)task->N);
        if (task->state_out) store(task, room->p, &room->clouds[c], c * task->B + b);
    }
    return status;
}

int filter_rows(const Task *task, const Programs *programs)
{
    Room room;
    int status = make_room(&room, programs, (int)task->N, (int)task->tries);
    for (i64 b = task->first; b < task->last && !status; b++) status = filter_episode(&room, task, b);
    free(room.memory);
    return status;
}
