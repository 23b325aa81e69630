"""The record of what ptxas made of the shipped kernels: what it is held to, and what it ignores."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from hopper.forward.tilings import shipped_forward_configs
from hopper.inspection import ResourceUsage, digest_of_code
from tests import compile_pool, shipped_usage, store
from tests.shipped_usage import (
    RECORD,
    code_of,
    every_recorded_kernel,
    every_shipped_kernel,
    fingerprint,
    recorded,
)

ONE = ResourceUsage(128, 0, 0, 0, 1024)


FORCED = "ampere_fwd_sm_90a"
"""Forward kernels without WGMMA for Hopper, where they run if asked for. Those of head_dim 128 spill a few bytes."""


def test_every_shipped_kernel_is_recorded_without_spills() -> None:
    """For sm_80, sm_86, sm_89, sm_120 and sm_90a. If the sources are others by now, the tests compile instead."""
    shipped, every = every_shipped_kernel(), every_recorded_kernel()
    names = {config.name for config in shipped}
    usage = {name: ResourceUsage(*x) for name, x in json.loads(RECORD.read_text())["kernels"].items()}
    if len(recorded(every.values())) == len(every):
        assert set(usage) == set(every) and len(names) == len(shipped)
    spilling = {name: x for name, x in usage.items() if name in names and (x.spills or x.stack_bytes)}
    assert all(
        FORCED in name and "_d128_" in name and x.spill_store_bytes <= 48 for name, x in spilling.items()
    )


def test_comments_docstrings_and_layout_are_not_code() -> None:
    plain = "def f(x):\n    return x + 1\n"
    documented = '"""Module."""\n\ndef f(x):  # adds\n    """One more."""\n    return (x\n            + 1)\n'
    assert code_of(plain) == code_of(documented)
    assert code_of(plain) != code_of(plain.replace("1", "2")) != code_of(plain.replace("x", "y"))


class Config:
    def __init__(self, name: str):
        self.name = name


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is compiled; "sampled" alone is in the sample."""
    seen: list[str] = []

    def compile_each(configs, compile_one):
        assert compile_one is compile_pool.kept_usage
        seen.extend(config.name for config in configs)
        return dict.fromkeys(configs, ONE)

    monkeypatch.setattr(compile_pool, "compile_each", compile_each)
    monkeypatch.setattr(compile_pool, "sample", lambda known: [c for c in known if c.name == "sampled"])
    return seen


def test_only_the_sample_and_what_is_new_are_compiled(compiled, monkeypatch) -> None:
    other = ResourceUsage(255, 0, 0, 0, 2048)
    monkeypatch.setattr(compile_pool, "recorded", lambda configs: {"known": other, "sampled": ONE})
    configs = [Config(name) for name in ("known", "sampled", "new")]
    assert list(compile_pool.usage_of_each(configs).values()) == [other, ONE, ONE]
    assert compiled == ["sampled", "new"]


def test_what_is_compiled_must_be_as_recorded(compiled, monkeypatch) -> None:
    monkeypatch.setattr(
        compile_pool, "recorded", lambda configs: {"sampled": ResourceUsage(255, 0, 0, 0, 1024)}
    )
    with pytest.raises(AssertionError, match=r"sampled: recorded .*255.*, compiled .*128"):
        compile_pool.usage_of_each([Config("sampled")])


def test_what_has_two_machine_codes_by_chance_has_the_recorded_one_in_the_end(compiled, monkeypatch) -> None:
    """And what has another for good has not."""
    recorded = replace(ONE, code="recorded")
    monkeypatch.setattr(compile_pool, "recorded", lambda configs: {"sampled": recorded})
    codes = iter(["other", "other", "recorded"])
    monkeypatch.setattr(compile_pool, "resource_usage", lambda config: replace(ONE, code=next(codes)))
    compile_pool.usage_of_each([Config("sampled")])
    assert next(codes, None) is None
    monkeypatch.setattr(compile_pool, "resource_usage", lambda config: replace(ONE, code="other"))
    with pytest.raises(AssertionError, match=r"sampled: recorded .*'recorded'"):
        compile_pool.usage_of_each([Config("sampled")])


def test_the_digest_is_of_instructions_and_constants_alone() -> None:
    def cubin(*sections: tuple[bytes, bytes]) -> bytes:
        names = b"\0" + b"".join(name + b"\0" for name, _ in sections)
        header, contents, headers = bytearray(64), names, b""
        for name, data in ((b"", names), *sections):
            offset = 64 if data is names else 64 + len(contents)
            contents += b"" if data is names else data
            headers += struct.pack("<IIQQQQ24x", names.index(name + b"\0"), 0, 0, 0, offset, len(data))
        struct.pack_into("<Q", header, 0x28, 64 + len(contents))
        struct.pack_into("<3H", header, 0x3A, 64, len(sections) + 1, 0)
        return bytes(header) + contents + headers

    code, constants = (b".text.kernel", b"add"), (b".nv.constant0.kernel", b"1")
    digest = digest_of_code(cubin(code, constants, (b".symtab", b"x")))
    assert digest == digest_of_code(cubin((b".nv.constant0.k", b"1"), (b".text.k", b"add"), (b".note", b"y")))
    assert digest != digest_of_code(cubin(code, (constants[0], b"2")))
    assert digest != digest_of_code(cubin((code[0], b"mul"), constants))
    with pytest.raises(RuntimeError, match="no machine code"):
        digest_of_code(cubin(constants))


def test_a_record_of_other_sources_does_not_count(tmp_path, monkeypatch) -> None:
    config = shipped_forward_configs()[0]
    record = {
        "fingerprints": {"hopper.forward.compile": "another"},
        "kernels": {config.name: [1, 0, 0, 0, 0, ""]},
    }
    path = tmp_path / "record.json"
    monkeypatch.setattr(shipped_usage, "RECORD", path)
    path.write_text(json.dumps(record))
    assert recorded([config]) == {} and shipped_usage.main(["--check"]) == 1
    record["fingerprints"]["hopper.forward.compile"] = fingerprint("hopper.forward.compile")
    path.write_text(json.dumps(record))
    assert recorded([config]) == {config.name: ResourceUsage(1, 0, 0, 0, 0)}


def test_one_of_a_hundred_is_sampled_and_others_with_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    every, samples = every_shipped_kernel(), []
    for sources in range(30):
        monkeypatch.setattr(
            compile_pool, "fingerprint", lambda module, sources=sources: f"{module} {sources}"
        )
        samples.append(frozenset(config.name for config in compile_pool.sample(every)))
    drawn = sum(map(len, samples))
    # Five times the spread of so many draws.
    assert abs(drawn - 0.3 * len(every)) < 5 * (0.3 * len(every)) ** 0.5
    assert len(set(samples)) > 20


def test_a_compiled_kernel_is_kept_for_the_sources_that_it_is_of(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    config, compiled = shipped_forward_configs()[0], []

    def usage(config):
        compiled.append(config.name)
        return ONE

    monkeypatch.setattr(compile_pool, "resource_usage", usage)
    assert compile_pool.kept_usage(config) == compile_pool.kept_usage(config) == ONE and len(compiled) == 1
    monkeypatch.setattr(store, "fingerprint", lambda module: "other sources")
    assert compile_pool.kept_usage(config) == ONE and len(compiled) == 2
    assert store.kept("another kind", config, lambda c: c.name) == config.name
