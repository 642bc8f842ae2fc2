/* The programs of a model, as a library of their own hands them over. */

/* A program over N particles: of a context and an action (its number, or 0 and the numbers of a continuous one),
   constants, learned constants and tables, what was observed and which of it, states and random numbers, it makes
   outputs. It returns 0, 1 if a check failed for a particle, or 2
   if something was observed that the program hides. */
typedef int (*Function)(
    int c, int a, const f64 *restrict act, const f64 *restrict K, const f64 *restrict P, const void *const *restrict tables,
    const f64 *restrict val, const u8 *restrict flag, void *const *xs, void *const *es, void *const *ys, int N);

/* A program under one context and action: its function (NULL if nothing happens), where its constants begin, and
   which outputs it writes (the others are inputs that stay as they are). */
typedef struct { Function function; int constants; const u8 *written; } Variant;

/* A program: its variants, by context and action; what its random numbers are; and which an action takes, [A, E]. */
typedef struct { const Variant *variants; const u8 *noise, *needed; } Program;

enum { F32, F64, I32, I64 };                                             /* types of numbers in a state */
enum { GIVEN_F32, GIVEN_F64, GIVEN_I32, GIVEN_I64, GIVEN_BOOL };         /* and in tensors */
enum { NORMAL, UNIFORM, NORMAL_D, UNIFORM_D, BITS };                     /* random numbers */

typedef struct {
    int C, A, D, E;              /* contexts, actions, numbers in a state, random numbers in a program */
    int reals;                   /* numbers of a continuous action, of which there is one variant (A = 1); else 0 */
    int values, flags;           /* how many an observation has */
    int num_parents, specialised; /* flags of sites that others depend on; whether there are variants */
    const u8 *type, *given;      /* [D] */
    const i64 *low, *high;       /* bounds of whole numbers, [D] */
    const int *parents;
    Program start, move, reward, score, partial_score, first_score, first_partial_score;
} Programs;
