/* Half a layer at a time, for a model split across processes: each holds some heads and a slice of the MLP's inner width.
 *
 * The processes' parts of one half are summed before the next half begins; the caller passes all of them.
 */
#ifndef SELFSPEC_HALVES_H
#define SELFSPEC_HALVES_H
#include "layers.h"

enum Half { ATTENTION, MLP, NEITHER };

typedef struct {
  Pass pass;          /* pass.first is the layer; pass.outputs receives this process's part, [rows, hidden] */
  float *x;           /* [rows, hidden] */
  const float *parts; /* parts of the previous half, [ranks, rows, hidden], added to x first; or NULL */
  const float *norm;  /* norm of their sum, or NULL */
  int64_t ranks;
  enum Half half;
} Halving;

/* A phase: x += norm(sum of all parts), summed in rank order. So little work that it is written in place. */
static void add_parts(Member *member, const Halving *a) {
  int64_t size = a->pass.shape.hidden, rows = a->pass.rows;
  int64_t pieces = min(rows, worth_sharing(pool_team(member), a->ranks * rows * size * (int64_t)sizeof(float), 1));
  float *added = scratch_of(&a->pass).added;
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_win(&phase, piece)) continue;
    for (int64_t r = rows * piece / pieces; r < rows * (piece + 1) / pieces; r++) {
      float *sum = added + r * size, *x = a->x + r * size;
      memcpy(sum, a->parts + r * size, size * sizeof(float));
      for (int64_t rank = 1; rank < a->ranks; rank++)
        for (int64_t i = 0; i < size; i++) sum[i] += a->parts[(rank * rows + r) * size + i];
      float factor = a->norm ? norm_factor(sum, a->pass.shape.eps, size) : 1;
      for (int64_t i = 0; i < size; i++) x[i] += a->norm ? sum[i] * factor * a->norm[i] : sum[i];
    }
    pool_done(&phase, piece);
  }
}

static void halving(const void *arguments, Member *member) {
  const Halving *a = arguments;
  const Pass *pass = &a->pass;
  const Scratch in = scratch_of(pass);
  if (a->parts) add_parts(member, a);
  if (a->half == ATTENTION) attention_half(member, pass, pass->first, a->x, NULL, NULL, pass->outputs, &in);
  if (a->half == MLP) mlp_half(member, pass, pass->first, a->x, NULL, NULL, pass->outputs, &in);
  leave_tiles();
}

_Static_assert(sizeof(Halving) <= POOL_ARGUMENTS, "the arguments of half a layer are too large for the team");
#endif
