/* Half a layer at a time, for a model that several processes hold: each has some heads and a part of the MLP's inner width.
 *
 * What they find in one half is summed before the next: the caller brings all processes' parts of it.
 */
#ifndef SELFSPEC_HALVES_H
#define SELFSPEC_HALVES_H
#include "layers.h"

enum Half { ATTENTION, MLP, NEITHER };

typedef struct {
  Pass pass;          /* its first layer is the one; its outputs get this process's part, [rows, hidden] */
  float *x;           /* [rows, hidden] */
  const float *parts; /* of the half before, [ranks, rows, hidden], that are added to x first; or NULL */
  const float *norm;  /* of their sum, or NULL */
  int64_t ranks;
  enum Half half;
} Halving;

/* A phase: x += norm(the sum of all parts), in the order of ranks. So little work that it is done where the result belongs. */
static void join(Member *member, const Halving *a) {
  int64_t size = a->pass.shape.hidden, rows = a->pass.rows, pieces = least(rows, pool_team(member));
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
  if (a->parts) join(member, a);
  if (a->half == ATTENTION) attention_half(member, pass, pass->first, a->x, NULL, NULL, pass->outputs, &in);
  if (a->half == MLP) mlp_half(member, pass, pass->first, a->x, NULL, NULL, pass->outputs, &in);
  leave_tiles();
}

_Static_assert(sizeof(Halving) <= POOL_ARGUMENTS, "the arguments of half a layer are too large for the team");
#endif
