"""Which backend serves what and why, what is copied, and what the machine is said to have."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import select_ampere_backward_config
from cute_kernels.ampere.config import AmpereForwardConfig
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper_attention import _kernels, describe_machine, dispatch, driver, explain, flash_attn_func, machine
from hopper_attention.backends import Choice, Target, choose_backend
from hopper_attention.checks import TensorSpec
from hopper_attention.dispatch import Plan, ReferenceConfig
from hopper_attention.launch import forward
from hopper_attention.layout import Repair, repair_for
from hopper_attention.torch_rules import TorchConfig
from tests.python.fake_gpu import forget_launchers

HOPPER = (9, 0)
H200 = Target("NVIDIA H200", HOPPER, assume_installed=True)
A100 = Target("NVIDIA A100", (8, 0), assume_installed=True)
T4 = Target("Tesla T4", (7, 5), assume_installed=True)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def plan_for(q: Tensor, k: Tensor, v: Tensor, **options) -> Plan:
    return explain(q, k, v, device_capability=HOPPER, **options)


# the rule


def test_hopper_is_chosen_on_capability_nine_exactly() -> None:
    assert choose_backend(H200, torch.float16).backend == "hopper"
    for capability in ((7, 5), (9, 1), (10, 0)):
        target = Target("some GPU", capability, assume_installed=True)
        assert choose_backend(target, torch.float16).backend == "torch"
        choice = choose_backend(target, torch.float16, unserved="torch's fused attention has no softcap")
        assert choice.backend == "reference"
        major, minor = capability
        assert (
            f"some GPU has compute capability {major}.{minor} and the kernels are for 8.0," in choice.reason
        )
        assert "and torch's fused attention has no softcap" in choice.reason
        assert "flex_attention" in choice.advice


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_80"), ((8, 9), "sm_89"), ((12, 0), "sm_120")],
)
def test_gpus_without_wgmma_get_the_ampere_kernels(capability: tuple[int, int], arch: str) -> None:
    q = meta(1, 128, 2, 64)
    plan = explain(q, q, q, device_capability=capability)
    assert plan.backend == "ampere" and isinstance(plan.config, AmpereForwardConfig)
    assert plan.config.arch == arch and f"compiled   for {arch}, with cp.async and mma.sync" in str(plan)
    assert explain(q, q, q, device_capability=capability, backend="ampere").config == plan.config
    note = explain(q.requires_grad_(), q, q, device_capability=capability).notes[-1]
    assert note.startswith(
        f"the backward pass runs on the kernel without WGMMA ampere_bwd_{arch}_bf16_d64_full_"
    )


def test_what_is_done_to_scores_is_in_the_config_of_an_ampere_kernel() -> None:
    q, slopes = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16, device="meta"), torch.empty(2, device="meta")
    options: dict[str, Any] = {"softcap": 30.0, "alibi_slopes": slopes, "sinks": slopes}
    for name, field in zip(options, ("softcap", "alibi", "sinks"), strict=True):
        plan = explain(q, q, q, device_capability=(8, 0), **{name: options[name]})
        assert plan.backend == "ampere" and isinstance(plan.config, AmpereForwardConfig)
        assert plan.config.name.endswith(f"_{field}")


def test_the_ampere_kernels_can_be_asked_for_on_hopper() -> None:
    q = meta(1, 128, 2, 72).requires_grad_()
    plan = plan_for(q, q, q, backend="ampere")
    assert plan.backend == "ampere" and plan.reason.startswith("asked for with backend='ampere'; ")
    assert isinstance(plan.config, AmpereForwardConfig)
    assert (plan.config.arch, plan.config.head_dim) == ("sm_90a", 96)
    name = select_ampere_backward_config("bfloat16", 72, 72, False, "sm_90a").name
    assert name.startswith("ampere_bwd_sm_90a_bf16_d96_full_")
    assert plan.notes[-1] == f"the backward pass runs on the kernel without WGMMA {name}"


def test_missing_packages_are_named_with_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "missing_packages", lambda: ("nvidia-cutlass-dsl",))
    choice = choose_backend(Target("NVIDIA H200", HOPPER), torch.float16)
    assert choice.backend == "torch"
    assert choice.reason.startswith("the kernels need nvidia-cutlass-dsl, not installed here")
    assert choice.advice == "install them with: pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"


def test_what_the_cpu_gets_needs_no_advice() -> None:
    assert choose_backend(Target("cpu"), torch.float16) == Choice("torch", "cpu is not an NVIDIA GPU")
    unserved = Choice("reference", "cpu is not an NVIDIA GPU, and there is a softcap")
    assert choose_backend(Target("cpu"), torch.float16, unserved="there is a softcap") == unserved


def test_what_was_never_run_is_said_to_be_so() -> None:
    for target in (Target("AMD Instinct MI300X"), Target("xpu"), Target("npu:0"), Target("mps"), T4):
        for requested in (None, "torch"):
            choice = choose_backend(target, torch.float16, requested)
            assert choice.backend == "torch" and "has never run on such a device" in choice.reason
    assert "never" not in choose_backend(H200, torch.float16, "torch").reason


def test_the_reference_can_be_asked_for_anywhere() -> None:
    wanted = Choice("reference", "asked for with backend='reference'")
    assert choose_backend(H200, torch.float16, "reference") == wanted


def test_asking_for_hopper_where_it_cannot_run() -> None:
    allowed = "allowed here: 'ampere', 'torch', 'reference' or None"
    with pytest.raises(ValueError, match=rf"backend is 'hopper', but NVIDIA A100 has .* 8.0 .*; {allowed}"):
        choose_backend(A100, torch.float16, "hopper")


def test_a_gpu_that_runs_the_reference_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "target_of", lambda device: T4)
    forget_launchers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seqlen in (3, 5, 5, 7):
            x = torch.zeros(1, seqlen, 1, 64, dtype=torch.float16)
            flash_attn_func(x, x, x)
            flash_attn_func(x, x, x, softcap=9.0)
    forget_launchers()
    (message,) = [str(w.message) for w in caught]
    assert "tiled reference, which is slow: Tesla T4 has compute capability 7.5" in message
    assert "has no softcap; torch.nn.attention.flex_attention, compiled, may be faster" in message


def test_asking_for_the_reference_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "target_of", lambda device: T4)
    forget_launchers()
    x = torch.zeros(1, 3, 1, 64, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(x, x, x, backend="reference")
    forget_launchers()


# explain


def test_plan_for_a_hopper_gpu() -> None:
    plan = plan_for(meta(2, 4096, 16, 128), meta(2, 8192, 4, 128), meta(2, 8192, 4, 128), causal=True)
    assert plan.backend == "hopper" and plan.copies == ()
    assert isinstance(plan.config, ForwardConfig)
    assert (plan.config.dtype, plan.config.head_dim, plan.config.causal) == ("bfloat16", 128, True)
    assert "compute capability 9.0" in plan.reason and "bfloat16" in plan.reason
    c = plan.config
    lines = str(plan).splitlines()
    assert lines[0] == "backend    hopper"
    assert f"tile       {c.tile_m} queries x {c.tile_n} keys" in lines
    assert f"stages     {c.stages} of K and of V, {c.smem_bytes} bytes of shared memory" in lines
    assert f"warpgroups {c.consumers} consumers and 1 producer, {c.threads} threads" in lines
    registers = f"{c.registers.consumer} a consumer thread, {c.registers.producer} a producer thread"
    assert f"registers  {registers}" in lines
    assert "longest causal tiles first" in str(plan) and "copies     none" in lines


def test_schedule_line_says_what_the_config_does() -> None:
    q = meta(1, 128, 2, 256)
    plan = plan_for(q, q, q)
    assert isinstance(plan.config, ForwardConfig)
    assert ("ping-pong" in str(plan)) == plan.config.ping_pong
    assert plan.config.late_rescale and "O rescaled under the next Q K^T" in str(plan)
    assert "longest causal tiles first" not in str(plan)
    plain = dataclasses.replace(
        plan,
        config=dataclasses.replace(plan.config, pipelined=False, ping_pong=False, late_rescale=False),
    )
    assert "schedule   persistent grid" in str(plain).splitlines()


def test_plan_for_an_older_gpu() -> None:
    q = meta(1, 128, 2, 64)
    plan = explain(q, q, q, device_capability=(7, 5))
    assert plan.backend == "torch" and plan.config == TorchConfig() and plan.notes == ()
    assert "compute capability 7.5 and the kernels are for 8.0, 8.6," in plan.reason
    plan = explain(q, q, q, softcap=9.0, device_capability=(7, 5))
    assert plan.backend == "reference" and plan.config == ReferenceConfig()
    assert plan.notes[0] == "torch.nn.attention.flex_attention, compiled, may be faster there"


def test_plan_for_this_machines_cpu() -> None:
    q = torch.zeros(1, 12, 2, 64, dtype=torch.float16)
    plan = explain(q, q, q, 0.1, True)
    assert (plan.backend, plan.reason) == ("torch", "cpu is not an NVIDIA GPU")
    assert "config     torch_sdpa" in str(plan).splitlines() and "tile" not in str(plan)
    plan = explain(q, q, q, 0.1, True, backend="reference")
    assert "tile       128 queries x 128 keys" in str(plan).splitlines()


def test_plan_for_fp8() -> None:
    q = meta(1, 300, 2, 64, dtype=torch.float8_e4m3fn)
    plan = plan_for(q, q, q)
    assert plan.backend == "hopper" and isinstance(plan.config, Fp8ForwardConfig)
    assert plan.config == select_fp8_forward_config(64, 64, False, "bfloat16", 300, v_rows=True)
    emulated = plan_for(q, q, q, backend="reference")
    assert emulated.config == ReferenceConfig(fp8=True) and "fp8" in emulated.config.name
    odd = meta(1, 128, 2, 72, dtype=torch.float8_e4m3fn)
    plan = plan_for(odd, odd, odd)
    assert plan.backend == "reference" and "must be multiples of 16" in plan.reason


@pytest.mark.parametrize("seqlen", [128, 16384])
def test_plan_for_fp8_with_two_level_accumulation(seqlen: int) -> None:
    q = meta(1, seqlen, 2, 128, dtype=torch.float8_e4m3fn)
    plan = plan_for(q, q, q, two_level_accumulation=True)
    assert isinstance(plan.config, Fp8ForwardConfig) and plan.config.two_level
    assert plan.config.v_rows == (seqlen == 128) and "P V added to O in float32" in str(plan)
    assert "P V added" not in str(plan_for(q, q, q))
    wide = meta(1, seqlen, 2, 128)
    assert plan_for(wide, wide, wide, two_level_accumulation=True) == plan_for(wide, wide, wide)
    with pytest.raises(TypeError, match="two_level_accumulation is 'yes', allowed: True or False"):
        plan_for(q, q, q, two_level_accumulation="yes")


def test_plan_for_fp8_with_many_queries_says_that_v_is_transposed_first() -> None:
    q = meta(1, 16384, 2, 128, dtype=torch.float8_e4m3fn)
    plan = plan_for(q, q, q)
    assert isinstance(plan.config, Fp8ForwardConfig) and not plan.config.v_rows
    assert any(text.startswith("v is transposed by PyTorch") for text in plan.copies)


def test_short_head_dims_are_covered_by_a_native_tile() -> None:
    plan = plan_for(meta(1, 9, 2, 72), meta(1, 9, 2, 72), meta(1, 9, 2, 40))
    assert isinstance(plan.config, ForwardConfig)
    assert plan.config.head_dim >= 72 and plan.config.head_dim_v >= 40


def test_notes_on_empty_problems_and_gradients() -> None:
    q, k = meta(1, 9, 2, 64), meta(1, 0, 2, 64)
    assert plan_for(q, k, k).notes == ("seqlen_k is 0: no kernel runs",)
    notes = plan_for(q.requires_grad_(), q, q).notes
    assert len(notes) == 1 and notes[0].startswith("the backward pass runs on the Hopper kernel hopper_bwd_")
    assert plan_for(q, k, k).notes == ("seqlen_k is 0: no kernel runs",)
    with torch.no_grad():
        assert plan_for(q, q, q).notes == ()
    one_key = meta(1, 1, 2, 64)
    assert (
        plan_for(q, one_key, one_key)
        .notes[0]
        .startswith("the backward pass is PyTorch's: with one key P is 1")
    )
    fp8 = meta(1, 20, 2, 64, dtype=torch.float8_e4m3fn).requires_grad_()
    refusal = "e4m3 inputs have no gradient: a backward pass through the result raises"
    assert plan_for(fp8, fp8, fp8).notes == (refusal,)
    with torch.no_grad():
        assert plan_for(fp8, fp8, fp8).notes == ()


def test_a_margin_that_no_gpu_of_a_kind_has_is_refused() -> None:
    q, fp8 = meta(1, 9, 2, 64), meta(1, 20, 2, 64, dtype=torch.float8_e4m3fn)
    for x in (q, fp8):
        for margin in (132, 100_000):
            allowed = (
                "allowed on GPUs of compute capability 9.0, which have at most 132 multiprocessors: 0 to 131"
            )
            with pytest.raises(ValueError, match=f"sm_margin is {margin}, {allowed}"):
                plan_for(x, x, x, sm_margin=margin)
        note = "sm_margin 12 must be less than the GPU's multiprocessors, of which it has at most 132"
        assert note in plan_for(x, x, x, sm_margin=12).notes
        assert plan_for(x, x, x).notes == ()
        assert plan_for(x, x, x, sm_margin=200, backend="reference").backend == "reference"
    with pytest.raises(ValueError, match=r"compute capability 8\.9, which have at most 142 multiprocessors"):
        explain(q, q, q, sm_margin=142, device_capability=(8, 9))
    assert explain(torch.zeros(1, 9, 2, 64).half(), *[torch.zeros(1, 9, 2, 64).half()] * 2, sm_margin=10**5)


def test_a_margin_is_held_to_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, FakeProperties("NVIDIA H200", 9, 0))
    monkeypatch.setattr(dispatch, "target_of", lambda device: Target("NVIDIA H200", HOPPER))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: FakeProperties("NVIDIA H200", 9, 0)
    )
    monkeypatch.setattr(_kernels, "missing_packages", lambda: ())
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        x = meta(1, 9, 2, 64, dtype=dtype)
        with pytest.raises(ValueError, match="sm_margin is 132, allowed on this GPU: 0 to 131"):
            explain(x, x, x, sm_margin=132)
        assert explain(x, x, x, sm_margin=131).backend == "hopper"


def test_device_capability_must_be_a_pair() -> None:
    q = meta(1, 9, 2, 64)
    with pytest.raises(ValueError, match=r"device_capability is 90, allowed: \(major, minor\), for instance"):
        explain(q, q, q, device_capability=90)


# copies


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Tensor:
    base = torch.zeros(100_000, dtype=torch.bfloat16)
    return base.as_strided(shape, strides, offset)


ADDRESSABLE = [
    ((2, 9, 4, 64), (9 * 4 * 64, 4 * 64, 64, 1)),
    ((2, 9, 4, 64), (64 * 9, 64, 2 * 64 * 9, 1)),
    ((2, 9, 4, 64), (9 * 4 * 72, 4 * 72, 72, 1)),
]
NOT_ADDRESSABLE = [
    (
        (2, 9, 4, 64),
        (9 * 4 * 65, 4 * 65, 65, 1),
        "its stride in dimension 0 is 2340, and the kernel needs a multiple of 8",
    ),
    (
        (2, 9, 4, 64),
        (9 * 264, 260, 64, 1),
        "its stride in dimension 1 is 260, and the kernel needs a multiple of 8",
    ),
    (
        (2, 9, 4, 64),
        (9 * 64, 64, 0, 1),
        "its stride in dimension 2 is 0, and the kernel needs a multiple of 8",
    ),
]


@pytest.mark.parametrize("shape,strides", ADDRESSABLE)
def test_what_tma_can_address_is_left_alone(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    x = strided(shape, strides)
    assert repair_for(TensorSpec.of(x)) == Repair.NONE
    assert plan_for(x, x, x).copies == ()


@pytest.mark.parametrize("shape,strides,reason", NOT_ADDRESSABLE)
def test_what_tma_cannot_address_is_copied(
    shape: tuple[int, ...], strides: tuple[int, ...], reason: str
) -> None:
    good, bad = strided(*ADDRESSABLE[0]), strided(shape, strides)
    repair = repair_for(TensorSpec.of(bad))
    assert repair == Repair.COPY
    copied = repair.apply(bad)
    assert copied.is_contiguous() and copied.data_ptr() % 16 == 0 and torch.equal(copied, bad)
    (text,) = plan_for(good, bad, good).copies
    assert text.startswith(f"k is copied to contiguous memory: {reason}")


def test_rows_that_are_not_contiguous_are_copied() -> None:
    x = torch.randn(2, 9, 2, 128).half()[..., ::2]
    repair = repair_for(TensorSpec.of(x))
    assert repair == Repair.COPY
    assert repair.apply(x).is_contiguous() and torch.equal(repair.apply(x), x)


def test_a_last_stride_other_than_one_is_copied() -> None:
    good = strided(*ADDRESSABLE[0])
    gaps = torch.zeros(2, 9, 4, 128, dtype=torch.bfloat16)[..., ::2]
    columns = torch.zeros(2, 4, 64, 9, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    reasons = [f"its stride in the last dimension is {n}, and the kernel needs 1" for n in (2, 9)]
    expected = tuple(
        f"{name} is copied to contiguous memory: {why}" for name, why in zip("kv", reasons, strict=True)
    )
    assert plan_for(good, gaps, columns).copies == expected


def test_a_misaligned_address_is_copied() -> None:
    good, bad = strided(*ADDRESSABLE[0]), strided(*ADDRESSABLE[0], offset=3)
    (text,) = plan_for(good, good, bad).copies
    assert text == "v is copied to contiguous memory: its address is 6 bytes past a multiple of 16"


def test_a_dimension_of_size_one_gets_another_stride_instead_of_a_copy() -> None:
    x = strided((1, 9, 1, 64), (3, 64, 0, 1))
    repair = repair_for(TensorSpec.of(x))
    assert repair == Repair.RESTRIDE
    fixed = repair.apply(x)
    assert fixed.stride() == (8, 64, 8, 1) and fixed.data_ptr() == x.data_ptr() and torch.equal(fixed, x)
    assert plan_for(x, x, x).copies == ()


# the machine


def test_describe_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(_kernels, "driver_cuda_version", lambda: ())
    here = describe_machine()
    assert here.torch == torch.__version__ and here.gpus == () and here.driver == "not installed"
    assert [(b.name, b.available) for b in here.backends] == [
        ("hopper", False),
        ("ampere", False),
        ("torch", True),
        ("reference", True),
    ]
    assert here.missing[0].what == "an NVIDIA driver and GPU"
    assert "backend reference" in str(here) and here.cache_dir in str(here)


class FakeProperties:
    def __init__(self, name: str, major: int, minor: int) -> None:
        self.name, self.major, self.minor = name, major, minor
        self.multi_processor_count = 132
        self.total_memory = 141 * 2**30


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: FakeProperties) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(_kernels, "driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(machine, "gpu_facts", lambda index: driver.UNKNOWN)


def test_describe_machine_with_two_kinds_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, FakeProperties("NVIDIA A100", 8, 0), FakeProperties("NVIDIA H200", 9, 0))
    here = describe_machine()
    assert [(gpu.name, gpu.capability, gpu.backend) for gpu in here.gpus] == [
        ("NVIDIA A100", (8, 0), "ampere"),
        ("NVIDIA H200", (9, 0), "hopper"),
    ]
    assert here.driver == "CUDA 13.0" and here.gpus[1].multiprocessors == 132
    assert here.backends[0] == machine.BackendStatus(
        "hopper", True, "16-bit attention and its gradients on GPU 1"
    )
    assert here.backends[1] == machine.BackendStatus(
        "ampere", True, "16-bit attention and its gradients on GPU 0"
    )
    assert here.missing == ()
    assert "NVIDIA H200, compute capability 9.0, 132 SMs, 141 GiB, runs the hopper backend" in str(here)


class FakeDriver:
    """``cuda.bindings.driver`` of a GPU with these attributes, by their names, and an error code for all else."""

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE = "clock"
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = "l2"

    def __init__(self, **attributes: int) -> None:
        self.attributes = attributes

    def cuInit(self, flags: int) -> tuple[int]:
        return (flags,)

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDeviceGetAttribute(self, attribute: str, gpu: int) -> tuple[int, int]:
        return int(attribute not in self.attributes), self.attributes.get(attribute, 0)


def test_the_driver_tells_clock_and_l2() -> None:
    facts = driver.read_facts(FakeDriver(clock=1_980_000, l2=50 * 2**20), 1)
    assert facts == driver.GpuFacts(1980, 50 * 2**20)
    assert driver.read_facts(FakeDriver(clock=1_980_000), 0) == driver.UNKNOWN
    gpu = machine.Gpu(0, "NVIDIA H200", (9, 0), 132, 141 * 2**30, "hopper", facts)
    assert gpu.parts == "132 SMs at up to 1980 MHz, 50 MiB of L2, 141 GiB"


def test_describe_machine_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, FakeProperties("NVIDIA A100", 8, 0))
    here = describe_machine()
    assert not here.backends[0].available
    assert (
        here.backends[0].reason
        == "NVIDIA A100 has compute capability 8.0 and the Hopper kernels need 9.0 exactly"
    )
    assert here.missing == ()
    fake_gpus(monkeypatch, FakeProperties("Tesla T4", 7, 5))
    assert [item.what for item in describe_machine().missing] == ["a GPU of compute capability 8.0 or newer"]
    fake_gpus(monkeypatch, FakeProperties("NVIDIA H200", 9, 0))
    status = describe_machine().backends[1]
    assert (
        status.available
        and status.reason == "16-bit attention and its gradients on GPU 0 with backend='ampere'"
    )
    monkeypatch.setattr(_kernels, "missing_packages", lambda: ("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    (item,) = describe_machine().missing
    assert item.what == "nvidia-cutlass-dsl and apache-tvm-ffi" and item.how == _kernels.INSTALL_DSL


def test_functions_of_scores_are_named_with_their_kernel() -> None:
    q = torch.empty(1, 300, 2, 64, dtype=torch.bfloat16)
    plan = explain(q, q, q, score_mod=lambda s, b, h, i, j: s + i - j, device_capability=HOPPER)
    plain = explain(q, q, q, device_capability=HOPPER)
    assert plan.backend == "hopper" and plan.config.functions and plan.config.name != plain.config.name
    assert any(note.startswith("score_mod: a function of yours") for note in plan.notes)
    hidden = explain(q, q, q, mask_mod=lambda b, h, i, j: i >= j, device_capability=HOPPER)
    assert any(note.startswith("mask_mod or block_mask") for note in hidden.notes)
