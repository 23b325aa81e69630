"""The kernel for decoding over a latent, and the one that puts parts together, run from their PTX without a GPU."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from hopper.decode.combine import COLUMNS_OF_A_CTA
from hopper.decode.config import BOX_COLUMNS, PARTS_PER_CTA
from hopper.mla.config import MlaConfig
from tests.hopper.decode_on_numpy import (
    Launch,
    Queries,
    add_lists,
    add_parts,
    add_tensors,
    combining_ctas,
    in_order,
    programs_of,
)
from tests.hopper.on_numpy import LOG2_E, NO_RULES, Arguments, Rules, row_map
from tests.hopper.paged_on_numpy import Cache


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
    q = queries.q
    cache = cache if config.paged else in_order(cache)
    out = torch.full(qv.shape, math.nan, dtype=q.dtype)
    lse = torch.full(queries.lse_shape, math.nan)
    parts = torch.full((PARTS_PER_CTA * launch.ctas, config.part_floats), math.nan)
    kernel, combine = programs_of(config)
    pads = cache.leftpad.tolist() if config.leftpad else [0] * len(cache.rows)
    filled = torch.tensor([n + pad for n, pad in zip(cache.lengths, pads, strict=True)], dtype=torch.int32)
    lists = queries, cache, filled, launch.max_splits, sides
    outputs = out, lse, *([] if rules.sinks is None else [rules.sinks])

    arguments = Arguments()
    arguments.add(*(row_map(x, config.box_rows, BOX_COLUMNS) for x in (cache.k, cache.v)))
    arguments.values += [struct.pack("<4i", *(x.shape[i] for i in (1, 3, 2, 0))) for x in (cache.k, cache.v)]
    add_tensors(arguments, q, qv, *([cache.table] if config.paged else []))
    add_lists(arguments, config, *lists)
    add_tensors(arguments, *outputs)
    add_parts(arguments, parts)
    arguments.add((rules.softcap or softmax_scale) * LOG2_E)
    if rules.softcap:
        arguments.add(softmax_scale / rules.softcap)
    arguments.launch(kernel, (config.cluster * launch.ctas, 1, 1), launch.timing, config.cluster)

    arguments = Arguments()
    add_tensors(arguments, q)
    add_lists(arguments, config, *lists)
    add_tensors(arguments, *outputs)
    add_parts(arguments, parts)
    arguments.add(launch.ctas)
    ctas = combining_ctas(config, queries, cache, launch)
    arguments.launch(combine, (ctas, launch.row_ctas, config.head_dim_v // COLUMNS_OF_A_CTA))
    return out, lse
