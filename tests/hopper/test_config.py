"""Forward configs: what is shipped is valid, what is not valid says why."""

import itertools
from dataclasses import replace
from functools import partial

import pytest

from cute_kernels.problem import DENSE, MAX_HEAD_DIM, VARLEN
from hopper.config import SMEM_BYTES, ForwardConfig, Registers, check_problem_size, validate_forward_config
from hopper.forward.fp8.config import Softmax
from hopper.forward.fp8.tilings import (
    select_fp8_few_queries_config,
    select_fp8_forward_config,
    with_lone_scales,
)
from hopper.forward.tilings import (
    NATIVE_HEAD_DIMS,
    TUNED_HEAD_DIMS,
    cover_head_dims,
    has_many_tiles,
    select_forward_config,
    select_plain_config,
    shipped_forward_configs,
    with_dropout,
)


def base() -> ForwardConfig:
    return select_forward_config("bfloat16", 128, 128, False, 4096)


def test_every_shipped_config_is_valid_and_has_a_name_of_its_own():
    configs = shipped_forward_configs()
    for config in configs:
        validate_forward_config(config)
        assert config.smem_bytes <= SMEM_BYTES
    assert len({config.name for config in configs}) == len(configs)


def test_every_head_dim_selects_a_shipped_config_that_covers_it():
    shipped = set(shipped_forward_configs())
    lengths = [1, 100, 512, 1024, 4096, 16384, 65536]
    for d, dv, causal in itertools.product(
        range(8, MAX_HEAD_DIM + 1, 8), (8, 64, 128, 200, 256), (False, True)
    ):
        for seqlen_k in lengths:
            config = select_forward_config("float16", d, dv, causal, seqlen_k)
            assert config in shipped
            assert config.head_dim >= d and config.head_dim_v >= dv and config.causal == causal


def test_cover_is_the_pair_of_least_work():
    assert cover_head_dims(64, 64) == (64, 64)
    assert cover_head_dims(72, 8) == (96, 96)
    assert cover_head_dims(160, 128) == (192, 128)
    assert cover_head_dims(8, 200) == (256, 256)
    assert all(cover_head_dims(*pair) == pair for pair in NATIVE_HEAD_DIMS)
    with pytest.raises(ValueError, match="at most 256"):
        cover_head_dims(264, 64)


def test_head_dims_that_would_be_a_fifth_zeros_have_kernels_of_their_own():
    for head_dim, native in ((72, 80), (80, 80), (88, 96), (104, 128), (136, 160), (160, 160), (168, 192)):
        for causal, layout in itertools.product((False, True), ("dense", "varlen")):
            config = select_forward_config("float16", head_dim, head_dim, causal, 4096, layout=layout)
            assert (config.head_dim, config.head_dim_v) == (native, native)
            validate_forward_config(config)


def test_products_leave_out_the_columns_that_rows_are_filled_up_with():
    names = {}
    dims = [*itertools.product(range(8, MAX_HEAD_DIM + 1, 8), (8, 64, 104, 128, 200, 256))]
    dims += [(d, d) for d in range(8, MAX_HEAD_DIM + 1, 8)]
    for (d, dv), causal, seqlen_k, many in itertools.product(dims, (False, True), (257, 4096), (False, True)):
        config = select_plain_config("bfloat16", d, dv, causal, seqlen_k, many)
        validate_forward_config(config)
        used = config.used_head_dim or config.head_dim
        assert d <= used < d + 16 and config.columns_pv == max(dv, 16)
        assert config.steps_qk in (0, used // 16)
        assert names.setdefault(config.name, config) == config
        if (d, dv) in TUNED_HEAD_DIMS:
            assert not config.used_head_dim


def test_high_tiles_of_plain_problems_are_for_many_tiles_of_some_head_dims():
    for d, causal in ((88, False), (96, True), (104, False), (104, True), (120, False)):
        few, many = (select_plain_config("float16", d, d, causal, 4096, is_many) for is_many in (False, True))
        assert (few.tile_m, many.tile_m) == (128, 192) and not many.ping_pong
        # 22 tiles of 192 queries: six heads are enough of them for every SM.
        assert [has_many_tiles(d, d, causal, (4096, 4096), heads) for heads in (5, 6)] == [False, True]
    for d, causal, seqlen_k in ((64, False, 512), (128, False, 4096), (112, True, 4096), (120, False, 16384)):
        config = select_plain_config("float16", d, d, causal, seqlen_k, True)
        assert config.tile_m == select_forward_config("float16", d, d, causal, seqlen_k).tile_m
    by_keys = {256: 64, 257: 192, 1024: 192}
    assert {n: select_plain_config("float16", 40, 40, False, n, True).tile_m for n in by_keys} == by_keys


@pytest.mark.parametrize(
    "head_dim,widths",
    [
        (64, {197: 64, 257: 96, 512: 64, 1024: 96}),
        (
            128,
            {
                96: 96,
                197: 128,
                288: 96,
                300: 176,
                480: 96,
                512: 128,
                960: 96,
                1024: 128,
                1025: 176,
                1280: 128,
                1281: 176,
            },
        ),
        (256, {512: 64, 576: 64, 640: 80, 1024: 80, 1281: 80}),
    ],
)
def test_few_keys_get_the_tiles_with_the_least_padding(head_dim, widths):
    for seqlen_k, tile_n in widths.items():
        assert select_forward_config("bfloat16", head_dim, head_dim, False, seqlen_k).tile_n == tile_n


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"head_dim": 40}, "head_dim is 40"),
        ({"head_dim_v": 288}, "head_dim_v is 288"),
        ({"tile_m": 96}, "tile_m is 96"),
        ({"tile_m": 64}, "ping_pong is True, allowed with tile_m 64: False"),
        ({"warp_specialized": False}, "allowed without a producer: Registers\\(consumer=256, producer=0\\)"),
        ({"tile_n": 100}, "tile_n is 100"),
        ({"stages": 1}, "stages is 1"),
        ({"ctas_per_sm": 0}, "ctas_per_sm is 0, allowed: 1 or more"),
        ({"registers": Registers(consumer=256, producer=24)}, "consumer 168 to 256, 64512 in all"),
        ({"registers": Registers(consumer=240, producer=16)}, "producer 24 to 168"),
        ({"registers": Registers(consumer=160, producer=24)}, "consumer 168 to 256"),
        (
            {"head_dim": 64, "head_dim_v": 256, "tile_n": 128},
            "O is staged in Q's memory and needs 65536 bytes, allowed: 16384",
        ),
        ({"tile_n": 256}, "bytes of shared memory, allowed: 232448"),
        (
            {"used_head_dim": 112},
            "used_head_dim is 112 and used_head_dim_v 0, allowed: both 0, or both more",
        ),
        (
            {"used_head_dim_v": 112},
            "used_head_dim is 0 and used_head_dim_v 112, allowed: both 0, or both more",
        ),
        ({"used_head_dim": 104, "used_head_dim_v": 104}, "used_head_dim is 104, allowed: multiples of 16"),
        ({"used_head_dim": 112, "used_head_dim_v": 100}, "used_head_dim_v is 100, allowed: multiples of 8"),
        ({"used_head_dim": 144, "used_head_dim_v": 64}, "used_head_dim is 144, .* up to head_dim, 128"),
    ],
)
def test_invalid_field_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        validate_forward_config(replace(base(), **change))


def test_output_staging_shares_query_memory_only_when_it_must():
    wide = replace(base(), sinks=True)
    narrow = replace(wide, tile_n=128)
    assert wide.o_shares_q and wide.smem_bytes + wide.o_bytes > SMEM_BYTES
    assert not narrow.o_shares_q
    assert narrow.smem_bytes == narrow.q_bytes + narrow.o_bytes + narrow.kv_bytes + 1024


def test_output_of_wide_heads_is_staged_in_the_memory_of_v():
    shipped = {config for config in shipped_forward_configs() if config.o_shares_v}
    assert {config.head_dim for config in shipped} == {160, 192}
    wide = select_forward_config("bfloat16", 256, 256, True, 4096)
    assert wide.smem_bytes == wide.q_bytes + wide.kv_bytes + 1024
    # At head_dim 256 it leaves from registers, where nothing is asked for but a causal mask.
    assert wide.o_from_registers and not (wide.o_shares_q or wide.o_shares_v)
    asked = [replace(wide, **{field: True}) for field in ("window", "sinks", "alibi")]
    asked.append(select_forward_config("bfloat16", 256, 256, True, 4096, layout="varlen"))
    asked.append(replace(wide, used_head_dim=208, used_head_dim_v=208))
    assert all(config.o_shares_v and not config.o_from_registers for config in asked)
    # A tile's last V may be as short as O is long, but no shorter; loads of pages go their own way.
    windowed = asked[0]
    assert replace(windowed, tile_n=64).o_shares_v and replace(windowed, tile_n=80, page_box=16).o_shares_q
    windowed = replace(base(), window=True)
    assert not windowed.o_shares_v and windowed.o_shares_q


def test_plain_output_of_128_columns_leaves_from_registers_where_it_has_no_place():
    wide, narrow = base(), select_forward_config("bfloat16", 128, 128, False, 512)
    assert wide.o_from_registers and not wide.o_shares_q and not wide.loads_k_ahead
    assert not narrow.o_from_registers and not narrow.o_shares_q
    others = [replace(wide, **{field: True}) for field in ("window", "sinks", "dropout")]
    others.append(replace(wide, used_head_dim=112, used_head_dim_v=112))
    assert all(config.o_shares_q and not config.o_from_registers for config in others)


def test_short_tiles_come_last_where_that_was_measured():
    causal, full = (select_forward_config("bfloat16", 256, 256, causal, 4096) for causal in (True, False))
    assert causal.ends_with_short_tiles and causal.has_divisors and not full.ends_with_short_tiles
    others = [replace(causal, **{field: True}) for field in ("window", "sinks", "softcap")]
    others.append(replace(causal, layout="varlen"))
    others += [
        select_forward_config("bfloat16", *size) for size in ((64, 64, True, 16384), (256, 256, True, 1024))
    ]
    assert not any(config.ends_with_short_tiles for config in others)
    for seqlen_k in (512, 4096, 16384):
        narrow = select_forward_config("bfloat16", 128, 128, True, seqlen_k)
        assert narrow.ends_with_short_tiles and narrow.least_m_blocks == 32 > causal.least_m_blocks
    assert not select_plain_config("bfloat16", 120, 120, True, 4096).ends_with_short_tiles


def test_query_tiles_are_counted_from_the_end_where_that_was_measured():
    wide = select_plain_config("bfloat16", 256, 256, True, 4096)
    assert wide.counts_from_end
    others = [replace(wide, **{field: True}) for field in ("window", "sinks", "softcap", "ping_pong")]
    others += [replace(wide, layout="varlen"), replace(wide, causal=False)]
    narrow = select_plain_config("bfloat16", 128, 128, True, 6145)
    assert narrow.counts_from_end and narrow.stores_first_apart and not wide.stores_first_apart
    others += [replace(narrow, **{field: True}) for field in ("window", "sinks", "softcap", "ping_pong")]
    short = select_plain_config("bfloat16", 128, 128, True, 6144)
    assert short.counts_from_end and (short.few_keys, narrow.few_keys, wide.few_keys) == (16, 0, 0)
    with pytest.raises(ValueError, match="few_keys is 16"):
        validate_forward_config(replace(short, window=True))
    others += [select_plain_config("float16", 128, 128, True, keys) for keys in (6144, 6145)]
    others.append(select_plain_config("bfloat16", 128, 128, True, 4096))
    sizes = ((64, 64, 8192), (120, 120, 8192), (224, 224, 4096), (256, 256, 1024))
    others += [select_plain_config("bfloat16", *dims, True, keys) for *dims, keys in sizes]
    assert not any(config.counts_from_end for config in others)


def test_a_warpgroup_without_a_query_leaves_plain_blocks_of_176_keys_out():
    config = select_plain_config("bfloat16", 128, 128, False, 1281)
    assert config.walks_apart and config.o_from_registers and config.first_widths == base().first_widths
    for seqlen_k in (*range(1025, 1281), 4099):
        by_padding = select_forward_config("bfloat16", 128, 128, False, seqlen_k)
        plain = select_plain_config("bfloat16", 128, 128, False, seqlen_k)
        assert plain == replace(by_padding, ping_pong=by_padding.tile_n != 176)
    assert select_plain_config("bfloat16", 128, 128, False, 300).ping_pong
    assert not select_plain_config("bfloat16", 120, 120, False, 16384).walks_apart
    for pair in ((128, 64), (64, 128), (128, 120)):
        assert select_plain_config("bfloat16", *pair, False, 16384).ping_pong
    assert not select_plain_config("bfloat16", 256, 256, False, 16384).walks_apart


def test_short_calls_ask_for_their_first_tile_and_begin_in_turns():
    def of(head_dim, causal, seqlen_k):
        return select_plain_config("bfloat16", head_dim, head_dim, causal, seqlen_k)

    for head_dim, causal in ((64, False), (64, True), (128, False), (128, True), (256, False), (256, True)):
        assert of(head_dim, causal, 512).asks_early
    whole, narrow, wide, long = (of(128, False, seqlen_k) for seqlen_k in (512, 288, 300, 4096))
    assert [config.tile_n for config in (whole, narrow, wide, long)] == [128, 96, 176, 176]
    assert [c.begins_in_turn for c in (whole, narrow, wide, long)] == [True, True, True, False]
    assert [c.has_whole_beginnings for c in (whole, narrow, wide, long)] == [True, False, False, False]
    assert not of(128, True, 16384).asks_early and not of(120, False, 512).asks_early
    changed = [replace(whole, **{field: True}) for field in ("window", "sinks", "dropout")]
    changed.append(replace(whole, layout="varlen"))
    changed += [select_fp8_forward_config(128, 128, causal, "bfloat16", 512) for causal in (False, True)]
    assert not any(c.asks_early or c.begins_in_turn or c.has_whole_beginnings for c in changed)


def test_fp8_with_v_in_rows_asks_for_its_first_tile_at_head_dim_256():
    def of(head_dim, causal, seqlen_k, **others):
        others = {"v_rows": True, "without_lse": True, **others}
        return select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", seqlen_k, **others)

    assert all(
        of(256, causal, seqlen_k).asks_early for causal in (False, True) for seqlen_k in (256, 1024, 2048)
    )
    others = [of(128, True, 1024), of(256, True, 1024, v_rows=False), of(256, True, 1024, window=True)]
    others += [of(256, True, 1024, layout="varlen")]
    assert not any(config.asks_early for config in others)


def test_warps_that_load_wait_alone_and_tiles_end_in_halves_at_head_dim_128():
    def of(head_dim, causal, seqlen_k, dtype="bfloat16"):
        return select_plain_config(dtype, head_dim, head_dim, causal, seqlen_k)

    whole, narrow, wide, long = (of(128, False, seqlen_k) for seqlen_k in (512, 288, 300, 4096))
    assert [c.waits_to_load for c in (whole, narrow, wide, long)] == [True, False, False, False]
    assert [c.ends_in_halves for c in (whole, narrow, wide, long)] == [True, False, False, False]
    others = [of(128, False, 512, "float16")]
    others += [
        of(head_dim, causal, 512) for head_dim, causal in ((64, False), (64, True), (128, True), (256, False))
    ]
    others += [replace(whole, **{field: True}) for field in ("window", "sinks", "dropout")]
    assert not any(c.waits_to_load or c.ends_in_halves for c in others)


def test_blocks_that_divide_no_power_of_two_are_cut_at_the_end():
    def of(head_dim, causal, seqlen_k, **others):
        config = select_forward_config("bfloat16", head_dim, head_dim, causal, seqlen_k)
        return replace(config, **others)

    assert of(128, False, 4096).first_widths == (64, 112)
    assert of(256, False, 4096).first_widths == of(256, True, 4096).first_widths == (32, 48, 64)
    for config in (of(128, False, 4096), of(256, True, 4096)):
        # Each left over by a usual length is within one of them, and in whole steps of P V.
        left = {2**n % config.tile_n for n in range(11, 15)}
        assert config.cuts_first_product and max(left) <= max(config.first_widths)
        assert all(width % 16 == 0 for width in config.first_widths)
        for others in ({"window": True}, {"sinks": True}, {"layout": "varlen"}):
            assert not replace(config, **others).cuts_first_product
    assert not of(128, True, 4096).cuts_first_product and not of(64, False, 4096).cuts_first_product


@pytest.mark.parametrize("head_dim,tile", [(136, 192), (144, 160), (152, 192), (160, 160)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_end_within_a_sector_get_whole_boxes(head_dim: int, tile: int, causal: bool):
    config = select_plain_config("float16", head_dim, head_dim, causal, 4096)
    assert config.head_dim == config.head_dim_v == tile
    assert config.columns_pv == head_dim and (config.used_head_dim or tile) == -(-head_dim // 16) * 16
    assert select_forward_config("float16", head_dim, head_dim, causal, 4096).head_dim == 160


def test_where_softmax_waits_for_the_second_row_and_shrinks_in_a_branch():
    """By head_dim and causal, for few keys and for many."""

    def of(head_dim, causal, seqlen_k):
        config = select_forward_config("bfloat16", head_dim, head_dim, causal, seqlen_k)
        return config.finds_second_maximum_late, config.shrinks_in_branch

    assert of(128, True, 6144) == of(128, False, 1280) == (True, False)
    assert of(128, True, 6145) == of(128, False, 1281) == (True, True)
    for head_dim in (64, 80, 96, 160, 256):
        assert of(head_dim, True, 16384) == of(head_dim, False, 16384) == (False, False)
    long = select_forward_config("bfloat16", 128, 128, False, 16384)
    capped = replace(long, softcap=True)
    assert not (capped.compares_bits or capped.finds_second_maximum_late or capped.shrinks_in_branch)


@pytest.mark.parametrize("keys,turns", [(1536, False), (1537, True), (9000, True)])
def test_wide_windows_take_turns_at_head_dim_128(keys: int, turns: bool):
    of_window, of_all = (
        select_forward_config("bfloat16", 128, 128, True, keys, window) for window in (True, False)
    )
    assert of_window.tile_n == of_all.tile_n and of_window.ping_pong == turns and not of_all.ping_pong
    # With dropout turns are worth more than walking apart where blocks are wide.
    assert with_dropout(of_all).ping_pong == (of_all.tile_n > 128)


def test_who_asks_for_the_next_key_block_ahead():
    """At head_dim 64 in 16 bits, where nobody waits for a turn."""
    few, many = (select_forward_config("bfloat16", 64, 64, True, n) for n in (512, 16384))
    assert few.asks_ahead and many.asks_ahead and replace(many, window=True).asks_ahead
    assert not replace(many, ping_pong=True).asks_ahead and not replace(many, pipelined=False).asks_ahead
    for head_dim in (80, 96, 128, 256):
        assert not any(
            select_forward_config("float16", head_dim, head_dim, causal, 16384).asks_ahead
            for causal in (False, True)
        )
    assert not select_fp8_forward_config(64, 64, True, "bfloat16", 16384).asks_ahead


def test_two_warpgroups_walk_apart_under_a_causal_mask():
    for head_dim in (104, 128):
        short, long = (select_forward_config("bfloat16", head_dim, head_dim, True, n) for n in (6144, 6145))
        assert (short.tile_n, long.tile_n) == (128, 160)
        for config in (short, long):
            assert (
                config.consumers == 2 and config.walks_apart and config.first_widths == (config.tile_n // 2,)
            )
            # Half of a block has no whole steps of P V there.
            assert not replace(config, tile_n=176).first_widths
    assert not base().walks_apart


@pytest.mark.parametrize(
    "seqlen_q,heads,is_many",
    [(4096, 5, False), (4096, 6, True), (192, 132, True), (193, 66, True), (192, 131, False)],
)
def test_high_tiles_need_one_for_each_sm(seqlen_q: int, heads: int, is_many: bool):
    def of(head_dim: int, causal: bool, seqlen_k: int) -> bool:
        return has_many_tiles(head_dim, 64, causal, (seqlen_q, seqlen_k), heads)

    assert of(64, True, 1537) == of(64, True, 6144) == of(40, True, 3000) == is_many
    # Elsewhere the number of tiles decides on nothing, and no problem is told from another by it.
    assert not any((of(64, True, 1536), of(64, True, 6145), of(64, False, 3000), of(128, True, 3000)))
    by_length = {
        n: select_forward_config("bfloat16", 64, 64, True, n, has_many_tiles=is_many)
        for n in (1536, 1537, 6144, 6145)
    }
    middle = 192 if is_many else 64
    assert [config.tile_m for config in by_length.values()] == [64, middle, middle, 192]


def test_ctas_of_an_sm_share_its_registers_and_shared_memory():
    alone = replace(base(), tile_m=64, tile_n=96, warp_specialized=False, ping_pong=False)
    for ctas, limit, registers in (
        (1, SMEM_BYTES, 256),
        (2, 115_712, 256),
        (3, 76_800, 168),
        (4, 57_344, 128),
    ):
        config = replace(alone, ctas_per_sm=ctas)
        assert (config.smem_limit, config.launched_registers) == (limit, registers)
        assert ctas * (config.smem_limit + 1024) <= 228 * 1024
    two = replace(alone, ctas_per_sm=2, registers=Registers(256, 0))
    validate_forward_config(two)
    assert two.smem_bytes == two.smem_limit and two.o_shares_q and two.name.endswith("_nows_x2")
    with pytest.raises(ValueError, match="need 132096 bytes of shared memory, allowed: 115712"):
        validate_forward_config(replace(two, tile_n=112))


def test_sizes_that_32_bit_tile_numbers_cannot_count_are_refused():
    config = base()
    check_problem_size(config, 1, 1, 2**31 - 512, 2**31 - 512)
    with pytest.raises(NotImplementedError, match="seqlen_k is 2147483521"):
        check_problem_size(config, 1, 1, 1, 2**31 - 127)
    with pytest.raises(NotImplementedError, match="seqlen_q is 2147483647"):
        check_problem_size(config, 1, 1, 2**31 - 1, 1)
    with pytest.raises(NotImplementedError, match="2147483648 tiles of 128 queries"):
        check_problem_size(config, 2**25, 64, 1, 1)


def test_fp8_output_that_does_not_fit_into_the_memory_of_q_is_refused():
    config = select_fp8_forward_config(256, 256, True, "bfloat16", 8192)
    with pytest.raises(ValueError, match="needs 65536 bytes, allowed: 32768; stages is 3 and tile_n 128"):
        validate_forward_config(replace(config, stages=3))


def test_what_a_softmax_that_lags_needs_is_named():
    config = select_fp8_forward_config(128, 128, False, "bfloat16", 8192)
    assert config.softmax is Softmax.LAGGING
    for change, message in (
        ({"pipelined": False}, "pipelined is False, allowed with softmax 'lagging': True"),
        (
            {"warp_specialized": False, "registers": Registers(168, 0)},
            "warp_specialized is False, allowed with softmax 'lagging': True",
        ),
        ({"late_rescale": False}, "late_rescale is False, allowed with softmax 'lagging': True"),
        ({"two_level": True}, "late_rescale is True, allowed with two_level: False"),
        ({"polynomial_pairs": 8}, "polynomial_pairs is 8, allowed with softmax 'lagging': 0 to 7"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_forward_config(replace(config, **change))


def test_invalid_fp8_fields_are_named():
    config = select_fp8_forward_config(128, 128, False, "bfloat16", 8192)
    for change, message in (
        ({"dtype": "float16"}, "dtype is 'float16', allowed: float8_e4m3fn"),
        ({"output": "float32"}, "output is 'float32'"),
        ({"tile_n": 48}, "tile_n is 48, allowed for float8_e4m3fn: multiples of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_forward_config(replace(config, **change))


@pytest.mark.parametrize("layout", [DENSE, VARLEN])
def test_scales_of_whole_heads_are_of_any_codes_in_one_sum(layout: str):
    of = partial(select_fp8_forward_config, 128, 128, False, "bfloat16", layout=layout)
    served = [of(512), of(8192), of(8192, 64), of(8192, without_lse=True)]
    if layout == DENSE:
        kinds = [Softmax.EAGER, Softmax.LAGGING, Softmax.EXACT, Softmax.HALF_SCORES]
        assert [config.softmax for config in served] == kinds and served[3].lowers_queries
    for config in served:
        lone = with_lone_scales(config)
        validate_forward_config(lone)
        assert not config.lone_scales and lone == replace(config, lone_scales=True) == with_lone_scales(lone)
        assert lone.name == f"{config.name}_lone"
    message = (
        "lone_scales is True, allowed for two_level, wide_codes, and scores in float16 without lowers_queries: "
        "False"
    )
    for config in (of(8192, two_level=True), of(8192, exact_lse=True), of(8192, half_scores=True)):
        assert with_lone_scales(config) == config and not config.lone_scales
        with pytest.raises(ValueError, match=f"^{message}$"):
            validate_forward_config(replace(config, lone_scales=True))


def test_scales_of_whole_heads_come_with_v_in_rows():
    for keys, options in ((512, {}), (8192, {}), (8192, {"without_lse": True}), (8192, {"window": True})):
        rows = select_fp8_forward_config(128, 128, True, "bfloat16", keys, v_rows=True, **options)
        assert rows.v_rows and rows.lone_scales
        assert not select_fp8_forward_config(128, 128, True, "bfloat16", keys, **options).lone_scales
    assert not select_fp8_forward_config(
        128, 128, True, "bfloat16", 8192, v_rows=True, two_level=True
    ).lone_scales
    for split in (False, True):
        assert select_fp8_few_queries_config(128, 128, True, "bfloat16", 4, 128, split).lone_scales


def test_v_is_awaited_early_where_no_block_waits_for_its_scale():
    """At head_dim 128 without a mask, with three warpgroups, which lower queries."""
    lowered = select_fp8_forward_config(128, 128, False, "bfloat16", 8192, without_lse=True)
    assert lowered.lowers_queries and lowered.consumers == 3 and not lowered.awaits_v_early
    assert with_lone_scales(lowered).awaits_v_early
    causal = select_fp8_forward_config(128, 128, True, "bfloat16", 8192, without_lse=True)
    assert causal.lowers_queries and not with_lone_scales(causal).awaits_v_early


@pytest.mark.parametrize(
    ("layout", "seqlen_k", "softmax"),
    [
        (DENSE, 1100, Softmax.EAGER),
        (DENSE, 2048, Softmax.LAGGING),
        (VARLEN, 0, Softmax.LAGGING),
        (DENSE, 9000, Softmax.HALF_SCORES),
    ],
)
def test_scores_that_fit_float16_lie_in_float32_where_the_lse_would_become_coarser(
    layout: str, seqlen_k: int, softmax: Softmax
) -> None:
    """Causal at head_dim 64, where float16 came last; elsewhere what is faster serves calls with the LSE too."""
    block_k = 128 if layout == VARLEN else 0
    of = partial(
        select_fp8_forward_config,
        64,
        64,
        True,
        "bfloat16",
        seqlen_k,
        block_k,
        half_scores=True,
        layout=layout,
    )
    assert of(without_lse=True).softmax is Softmax.HALF_SCORES
    assert of().softmax is softmax
    assert not of(without_lse=True).lowers_queries
