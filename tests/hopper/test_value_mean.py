"""The kernel of the mean of V: run from PTX on NumPy it finds what its twin in PyTorch does."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hopper.mean.config import (
    COLUMNS,
    EDGES_AT_ONCE,
    GROUPS,
    LOG_RUNS,
    MOST_PARTS,
    RUN,
    WORDS_OF_EDGES,
    RunMeansConfig,
    ValueMeanConfig,
    count_mean_ctas,
    groups_of,
    is_sampled,
    run_of,
    sample_size,
    select_value_mean_config,
    shipped_run_means_configs,
    shipped_value_mean_configs,
    sorting_pairs,
    validate_value_mean_config,
)
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.packed_quantization import packed_mean_worth_subtracting
from hopper_attention.value_mean_rules import keys_looked_at, mean_worth_subtracting, means_of_runs
from tests.compile_pool import assert_small, usage_of_each
from tests.cute_kernels.packing import Packing
from tests.hopper.edges import differences_of, steps_of
from tests.hopper.on_numpy import Arguments, program_of
from tests.hopper.test_fp8_packed import lengths_of

RUNS = 1 << LOG_RUNS

COMPILED = shipped_value_mean_configs()


def mean_on_numpy(v: Tensor, cluster: int) -> Tensor:
    batch, keys, heads, columns = v.shape
    mean = torch.full((batch, heads, columns), math.nan)
    arguments = Arguments()
    arguments.tensor(v, (batch, keys, heads, columns), v.stride()[:-1])
    arguments.tensor(mean, (batch, heads, columns), mean.stride()[:-1])
    config = ValueMeanConfig(DTYPE_NAMES[v.dtype], cluster)
    grid = count_mean_ctas(batch, heads, columns, cluster), 1, 1
    arguments.launch(program_of(config), grid, cluster=cluster)
    return mean


def means_on_numpy(v: Tensor, run: int, end: int, cluster: int) -> tuple[Tensor, Tensor, Tensor]:
    (batch, _, heads, columns), runs = v.shape, -(-end // run)
    statistics = torch.full((2, batch, runs, heads, columns), math.nan)
    means = torch.full((batch, runs, heads, columns), math.nan)
    differences = torch.full(
        (batch, -(-runs // EDGES_AT_ONCE), heads, WORDS_OF_EDGES * columns), -1, dtype=torch.int32
    )
    changes = torch.full((batch, heads, MOST_PARTS), -1, dtype=torch.int32)
    arguments = Arguments()
    arguments.tensor(v, tuple(v.shape), v.stride()[:-1])
    arguments.tensor(statistics, tuple(statistics.shape)[1:], statistics.stride()[:-1])
    arguments.add(runs, run, end)
    config = ValueMeanConfig(DTYPE_NAMES[v.dtype], cluster, of_runs=True)
    grid = count_mean_ctas(batch * runs, heads, columns, cluster), 1, 1
    arguments.launch(program_of(config), grid, cluster=cluster)
    arguments = Arguments()
    arguments.tensor(v, tuple(v.shape), v.stride()[:-1])
    arguments.tensor(statistics, tuple(statistics.shape)[1:], statistics.stride()[:-1])
    for x in (means, differences):
        arguments.tensor(x, tuple(x.shape), x.stride()[:-1])
    arguments.tensor(changes, (batch, heads), changes.stride()[:-1])
    arguments.add(run, end)
    config = RunMeansConfig(DTYPE_NAMES[v.dtype])
    arguments.launch(program_of(config), (-(-columns // COLUMNS), heads, batch))
    assert not differences_of(differences, EDGES_AT_ONCE * differences.shape[1])[:, runs:].any()
    return means, differences_of(differences, runs), changes


def draw(batch: int, keys: int, heads: int, columns: int) -> Tensor:
    """N(m, 1), where m is chance, small or large by the column, between other elements."""
    generator = torch.Generator().manual_seed(keys)
    v = torch.randn(batch, keys, 2 * heads, columns, generator=generator)
    offsets = torch.tensor([0.0, 0.5, -3.0, 0.0, 1.0, 40.0, -0.25, 0.0])
    return (v + offsets.repeat(columns // 8))[:, :, ::2]


def packed_mean_on_numpy(v: Tensor, packing: Packing, cluster: int) -> Tensor:
    total, heads, columns = v.shape
    mean = torch.full((packing.sequences, heads, columns), math.nan)
    arguments = Arguments()
    arguments.tensor(v[None], (1, total, heads, columns), v[None].stride()[:-1])
    arguments.tensor(mean, tuple(mean.shape), mean.stride()[:-1])
    for numbers in (packing.cu_seqlens_k, packing.seqused_k):
        arguments.tensor(torch.tensor(numbers, dtype=torch.int32), (len(numbers),), ())
    config = ValueMeanConfig(DTYPE_NAMES[v.dtype], cluster, "varlen")
    grid = count_mean_ctas(packing.sequences, heads, columns, cluster), 1, 1
    arguments.launch(program_of(config), grid, cluster=cluster)
    return mean


def test_steps_have_what_they_were_given() -> None:
    differences = torch.randn(2, 6, 3, 16, generator=torch.Generator().manual_seed(0))
    found = differences_of(steps_of(differences), 6)
    assert torch.allclose(found, differences, rtol=2.0**-16, atol=0)


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "columns", "dtype", "cluster"),
    [
        (1, 1500, 1, 64, torch.bfloat16, 8),
        (1, 17000, 1, 8, torch.bfloat16, 8),
        (1, 1500, 1, 64, torch.bfloat16, 1),
        (1, 70, 2, 80, torch.float16, 1),
        (2, 1, 1, 16, torch.bfloat16, 8),
        (1, 600, 1, 64, torch.float16, 2),
        (1, 2, 1, 16, torch.bfloat16, 1),
    ],
)
def test_kernel_finds_what_its_twin_does(
    batch: int, keys: int, heads: int, columns: int, dtype: torch.dtype, cluster: int
) -> None:
    v = draw(batch, keys, heads, columns).to(dtype)
    found, twin = mean_on_numpy(v, cluster), mean_worth_subtracting(v)
    assert torch.equal(found, twin)
    assert found.any()


@pytest.mark.parametrize(
    ("used", "cluster"), [({}, 8), ({"seqused_q": (1, 1, 1, 1), "seqused_k": (99, 40, 0, 1)}, 1)]
)
def test_packed_sequences_have_what_each_has_by_itself(used: dict[str, tuple], cluster: int) -> None:
    """Without a look at rows of no sequence, which are NaN."""
    packing = Packing.of([(1, 700), (1, 40), (1, 0), (1, 1)], (0, 50), **used)
    v = draw(1, packing.total_k, 1, 16)[0].bfloat16()
    sequences = range(packing.sequences - 1)
    is_used = torch.zeros(packing.total_k, dtype=torch.bool)
    for i in sequences:
        is_used[packing.rows_k(i)] = True
    v[~is_used] = math.nan
    found = packed_mean_on_numpy(v, packing, cluster)
    twin = packed_mean_worth_subtracting(v, lengths_of(packing))
    assert torch.equal(found[:-1], twin[:-1]) and not found[-1].any()
    for i in sequences:
        rows = packing.rows_k(i)
        alone = mean_worth_subtracting(v[None, rows]) if len(rows) else torch.zeros(1, 1, 16)
        assert torch.equal(found[i : i + 1], alone)


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "columns", "run", "end", "cluster"),
    [
        (2, 1500, 2, 64, 512, 1536, 1),
        (1, 700, 1, 80, 512, 704, 8),
        (1, 1031, 1, 8, 256, 1152, 2),
        (1, 8500, 1, 8, 1024, 8576, 2),
        (1, 16500, 1, 8, 512, 16512, 8),
    ],
)
def test_means_of_runs(
    batch: int, keys: int, heads: int, columns: int, run: int, end: int, cluster: int
) -> None:
    """Two columns of the last head have a mean that changes; another one has NaN."""
    v = torch.randn(batch, keys, heads, columns, generator=torch.Generator().manual_seed(keys)) + 1
    v[:, : keys // 2, -1, 2] -= 2.0
    v[:, : keys // 3, -1, 3] += 1.0
    v[:, 5, :, 4] = math.nan
    v = v.bfloat16()
    found, differences, changes = means_on_numpy(v, run, end, cluster)
    twin, twin_changes = means_of_runs(v, run, end)
    assert torch.equal(found, twin) and torch.equal(changes.amax(-1), twin_changes)
    more = found[:, :-1] - found[:, 1:]
    assert torch.allclose(differences[:, 1:], more, rtol=2.0**-16, atol=0) and not differences[:, 0].any()
    assert twin_changes[:, -1].all() and not changes[:, :-1].any() and not changes[:, :, 1:].any()
    same = found == found[:, :1]
    assert same[:, :, :-1].all() and not same[:, :, -1, 2].all()
    # Beside those two, others lose their own where it lies two standard errors apart: by chance, or as all keys lose
    # what leaves the first value exact.
    assert same[:, :, -1, 5:64].float().mean() > 0.6 and same[..., 64:].all()
    for number in range(-(-end // run)):
        first = max(end - (number + 1) * run, 0)
        left = v[:, first : end - number * run].float() - found[:, number : number + 1]
        few = left.shape[1] ** -0.5
        assert (left[..., 2].mean(1).abs() < 12 * few).all()
    first_left = v[:, 0, -1, 2].float() - found[:, -1, -1, 2]
    assert torch.equal(first_left.to(torch.float8_e4m3fn).float(), first_left)


def test_a_small_change_beside_a_large_one() -> None:
    """Of 0.3 by itself in runs of which 128 keys are looked at, where it is no more than chance may be, and where a
    column of the same 64 changes by more."""
    v = torch.randn(1, 2048, 1, 72, generator=torch.Generator().manual_seed(3))
    sign = torch.where(torch.arange(2048) // 512 % 2 == 0, 0.3, -0.3)
    v[..., [1, 70]] += sign[:, None, None]
    found, _, changes = means_on_numpy(v.bfloat16(), 512, 2048, 1)
    assert not changes.any() and (found == found[:, :1]).all()
    v[..., 0] += 5 * sign[:, None]
    found, _, changes = means_on_numpy(v.bfloat16(), 512, 2048, 1)
    twin, twin_changes = means_of_runs(v.bfloat16(), 512, 2048)
    assert torch.equal(found, twin) and changes.tolist() == [[[1, 0, 0, 0]]] and twin_changes.all()
    assert (found[0, :, 0, 1] - sign[::512].flip(0)).abs().max() < 0.2
    assert (found[..., 64:] == found[:, :1, :, 64:]).all()


def test_means_of_runs_whose_difference_is_no_number() -> None:
    """Those runs lose the mean of all; as far apart as that is a number, each loses its own."""
    v = torch.randn(1, 1500, 1, 8, generator=torch.Generator().manual_seed(0))
    v[:, 700:, :, 0], v[:, :700, :, 0] = 3e38, -3e38
    v[:, 700:, :, 1], v[:, :700, :, 1] = 3e37, -3e37
    v = v.bfloat16()
    found, differences, changes = means_on_numpy(v, 512, 1536, 1)
    twin, twin_changes = means_of_runs(v, 512, 1536)
    assert torch.equal(found, twin) and torch.equal(changes.amax(-1), twin_changes) and twin_changes.all()
    assert found.isfinite().all() and differences.isfinite().all()
    assert (found[..., 0] == found[:, :1, :, 0]).all() and differences[0, 2, 0, 1].abs() > 5e37


def test_means_leave_of_the_first_value_what_e4m3_has() -> None:
    """Unless that is too far from the mean for so many keys; further where the value is nearly nothing beside it."""
    v = draw(1, 1500, 1, 16)
    v[:, 0] = torch.linspace(0.0, 1.5, 16)
    v[:, 0, 0, -1] = 33.25
    v = v.bfloat16()
    found, twin = mean_on_numpy(v, 2), mean_worth_subtracting(v)
    left = v[:, 0].float() - found
    is_exact = left.to(torch.float8_e4m3fn).float() == left
    assert torch.equal(found, twin)
    assert is_exact[..., :15].float().mean() > 0.9 and not is_exact[..., 15]
    packing = Packing.of([(1, 1500), (1, 40)], (0, 0))
    rows = torch.cat([v[0], v[0, :40]])
    assert torch.equal(packed_mean_on_numpy(rows, packing, 2)[:1], twin)


def test_columns_keep_their_mean_where_the_first_token_is_little_and_keys_are_few() -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, 1000, 2, 80, generator=generator) + 0.4
    v[:, 0] *= 0.01
    # Of other neighbours one value is not little, and behind them are columns that are none.
    v[:, 0, 0, 40] = 1.0
    v = v.bfloat16()
    found, twin = mean_on_numpy(v, 2), mean_worth_subtracting(v)
    kept = found.abs() < 0.01
    assert torch.equal(found, twin)
    assert (
        kept[0, 0, :32].all() and kept[0, 0, 65:].all() and kept[0, 1].all() and not kept[0, 0, 32:64].any()
    )
    longer = torch.cat([v] + 12 * [v[:, 1:]], dim=1)
    assert (mean_worth_subtracting(longer).abs() > 0.25).all()


def test_bad_values_and_outliers() -> None:
    v = draw(1, 1600, 1, 16)
    v[0, 5:9, 0, 0], v[0, ::50, 0, 1], v[0, 70, 0, 2], v[0, 100:300, 0, 3] = math.nan, math.inf, -1e30, 3e4
    v[..., 4], v[..., 5] = 3.0, torch.finfo(torch.bfloat16).max
    v = v.bfloat16()
    found, twin = mean_on_numpy(v, 1)[0, 0], mean_worth_subtracting(v)[0, 0]
    assert torch.equal(found, twin)
    assert found[1] == 0 and found[4] == 3.0 and found.isfinite().all()
    # Off the mean by what spares the first value.
    assert abs(found[0]) < 0.2 and abs(found[2] + 3) < 0.2


def test_a_quarter_of_the_keys_is_looked_at() -> None:
    """In runs, another one of four in the next block; kernel and twin agree on which."""
    for length in (32, 100, 1024):
        looked_at = keys_looked_at(torch.arange(length), length)
        numbers = range(sample_size(length))
        rows = [(n // RUN * RUNS + run_of(n // RUN)) * RUN + n % RUN for n in numbers]
        assert looked_at.nonzero().flatten().tolist() == rows and len(rows) == length // 32 * 8
    runs = [run_of(block) for block in range(64)]
    assert all(runs.count(run) == 16 for run in range(RUNS))
    assert [is_sampled(n) for n in (511, 512, 16384, 16385)] == [False, True, True, False]


def test_sorting_pairs_sort() -> None:
    """All zeros and ones, and so everything (Knuth, volume 3, 5.3.4)."""
    bits = torch.arange(1 << GROUPS)[:, None] >> torch.arange(GROUPS) & 1
    columns = list(bits.to(torch.int8).unbind(1))
    for low, high in sorting_pairs(GROUPS):
        pair = columns[low], columns[high]
        columns[low], columns[high] = torch.minimum(*pair), torch.maximum(*pair)
    assert all(bool((a <= b).all()) for a, b in pairwise(columns))


def test_kernels_compile_without_spills() -> None:
    assert_small(COMPILED)
    of_runs = shipped_run_means_configs()
    assert all(usage.local_bytes == 0 for usage in usage_of_each(of_runs).values())


def test_configs() -> None:
    assert len({config.name for config in COMPILED}) == len(COMPILED)
    for sequences, cluster in ((1, 8), (2, 8), (4, 2), (8, 1), (64, 1)):
        config = select_value_mean_config("bfloat16", sequences, 16, 128)
        assert config == ValueMeanConfig("bfloat16", cluster) and config in COMPILED
        assert count_mean_ctas(sequences, 16, 80, cluster) == sequences * 32 * cluster
    for runs, cluster in ((9, 8), (10, 2), (31, 2), (32, 1)):
        assert select_value_mean_config("bfloat16", runs, 8, 64, keys_of_runs=16385).cluster == cluster
    for runs, cluster in ((1, 2), (31, 2), (32, 1)):
        assert select_value_mean_config("bfloat16", runs, 8, 64, keys_of_runs=16384).cluster == cluster
    assert {n: groups_of(n) for n in (1, 2, 5, 95, 128, 512, 700)} == {
        1: (1, 1), 2: (2, 1), 5: (3, 1), 95: (3, 31), 128: (4, 32), 512: (16, 32), 700: (16, 43)
    }  # fmt: skip
    for change, message in (
        ({"dtype": "float32"}, "dtype is 'float32', allowed: float16, bfloat16"),
        ({"cluster": 3}, "cluster is 3, allowed: 1, 2, 8"),
        ({"layout": "paged"}, "layout is 'paged', allowed: dense, varlen"),
        ({"layout": "varlen", "of_runs": True}, "of_runs is True, allowed for packed sequences: False"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_value_mean_config(replace(COMPILED[0], **change))


def test_the_host_does_without_the_dsl() -> None:
    command = "import sys, hopper_attention.quantization; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
