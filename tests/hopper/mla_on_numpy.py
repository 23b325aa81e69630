"""The kernel for decoding over a latent, and the one that puts parts together, run from their PTX without a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hopper.decode.combine import COLUMNS_OF_A_CTA
from hopper.decode.config import BOX_COLUMNS
from hopper.mla.config import OUTPUT_ROWS, MlaConfig
from tests.hopper.decode_on_numpy import Launch, Queries, Step, in_order
from tests.hopper.on_numpy import NO_RULES, Rules
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.tensor_maps import row_map, tile_map


def mla_on_numpy(
    config: MlaConfig,
    queries: Queries,
    qv: Tensor,
    cache: Cache,
    softmax_scale: float,
    launch: Launch,
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse, which were NaN before as the partial results were; ``launch.ctas`` counts clusters. Of ``rules``
    softcap and sinks are taken."""
    cache = cache if config.paged else in_order(cache)
    out = torch.full(qv.shape, math.nan, dtype=queries.q.dtype)
    maps = [row_map(x, config.box_rows, BOX_COLUMNS) for x in (cache.k, cache.v)]
    boxed = (queries.q, qv, out) if config.query_box else ()
    boxes = config.query_box, config.query_box, OUTPUT_ROWS
    maps += [tile_map(x, (3, 2, 1, 0), box, BOX_COLUMNS) for x, box in zip(boxed, boxes, strict=False)]
    columns = config.head_dim_v // COLUMNS_OF_A_CTA
    step = Step(config, queries, cache, launch, sides, rules)
    return out, step.run(maps, (queries.q, qv), out, softmax_scale, config.cluster, columns, boxed)
