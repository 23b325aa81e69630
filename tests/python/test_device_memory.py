"""What is kept on a GPU: made where no pool and no mode of torch reaches, and never taken from a captured graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper_attention import device_memory
from hopper_attention.device_memory import (
    Constants,
    GraphCounters,
    Piece,
    Pieces,
    Work,
    WorkMemory,
    filled,
    make_apart,
    tile_counter,
    unit_scales,
)
from hopper_attention.launch.at_once import parts_of

CPU = torch.device("cpu")
State = dict[str, Any]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    """What the GPU says of itself: whether a graph is being captured, and the current stream."""
    answers: State = {"capturing": False, "stream": 11}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers["capturing"])
    monkeypatch.setattr(device_memory, "is_capturing", lambda device: answers["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: answers["stream"], raising=False)
    monkeypatch.setattr(device_memory, "_tile_counters", {})
    monkeypatch.setattr(device_memory, "_graph_counters", GraphCounters(count=2))
    monkeypatch.setattr(device_memory, "constants", Constants())
    return answers


# made apart


def test_what_is_made_apart_is_made_by_another_thread() -> None:
    # Memory pools that torch allocates from are those of a thread, or of a stream that only this thread is on.
    threads: list[int] = []

    def make() -> Tensor:
        threads.append(threading.get_ident())
        return torch.ones(3)

    assert make_apart(make).tolist() == [1, 1, 1] and threads[0] != threading.get_ident()


def test_no_mode_of_torch_reaches_what_is_made_apart() -> None:
    with FakeTensorMode():
        made = make_apart(lambda: torch.ones(3))
    assert type(made) is Tensor and made.tolist() == [1, 1, 1]
    with torch.inference_mode():
        assert not make_apart(lambda: torch.ones(3)).is_inference()
    with torch.device("meta"):
        assert make_apart(lambda: torch.ones(3)).device == CPU


def test_what_goes_wrong_apart_is_raised() -> None:
    def fail() -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        make_apart(fail)


# counters


def test_tile_counters_are_kept_by_device_and_stream(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def make_here(make: Callable[[], Tensor]) -> Tensor:
        made.append(torch.zeros(2, dtype=torch.int32))
        return made[-1]

    monkeypatch.setattr(device_memory, "make_apart", make_here)
    first = tile_counter(0)
    assert tile_counter(0) is first and tile_counter(1) is not first
    state["stream"] = 12
    assert tile_counter(0) is not first
    state["stream"] = 11
    # Of each stream, and of each GPU those of graphs.
    assert tile_counter(0) is first and len(made) == 3 + 2


def test_a_captured_launch_shares_its_counter_with_none(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two graphs may be replayed at once, and a tensor of a graph's memory must not be kept.
    zeros: list[dict[str, Any]] = []

    def note(*size: int, **options: Any) -> Tensor:
        zeros.append(options)
        return torch.empty(size, dtype=options["dtype"]).zero_()

    state["capturing"] = True
    monkeypatch.setattr(torch, "zeros", note)
    counters = [tile_counter(0), tile_counter(0)]
    assert counters[0] is not counters[1] and device_memory._tile_counters == {}
    assert zeros == 2 * [{"dtype": torch.int32, "device": "cuda:0"}]


def test_captured_launches_take_counters_that_lie_ready(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A graph that zeroed a counter for each launch would take a node more, and a microsecond, at every replay.
    monkeypatch.setattr(device_memory, "_zeros_apart", lambda words, index: torch.zeros(words).int())
    of_stream = tile_counter(0)
    state["capturing"] = True
    taken = [tile_counter(0), tile_counter(0)]
    assert [x.tolist() for x in taken] == [[0, 0], [0, 0]] and taken[0].dtype == torch.int32
    distance = taken[1].data_ptr() - taken[0].data_ptr()
    assert distance == 4 * device_memory.COUNTER_STEP
    assert of_stream.data_ptr() not in [x.data_ptr() for x in taken]
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: ["a node of the graph"])
    assert tile_counter(0) == ["a node of the graph"] and tile_counter(1) == ["a node of the graph"]


# constants


def ones() -> Tensor:
    return torch.ones(2)


def test_a_constant_is_made_once(state: State) -> None:
    constants = Constants()
    first = constants.get("a", CPU, ones)
    assert first is not None and constants.get("a", CPU, ones) is first
    assert constants.get("b", CPU, ones) is not first


def test_nothing_is_made_while_a_graph_is_captured(state: State) -> None:
    constants = Constants()
    state["capturing"] = True
    assert constants.get("a", CPU, ones) is None
    state["capturing"] = False
    kept = constants.get("a", CPU, ones)
    state["capturing"] = True
    assert constants.get("a", CPU, ones) is kept


def test_what_a_graph_points_to_stays_when_others_go(state: State) -> None:
    constants = Constants(limit=4)
    of_graph, other = constants.get("graph", CPU, ones), constants.get("other", CPU, ones)
    state["capturing"] = True
    constants.get("graph", CPU, ones)
    state["capturing"] = False
    for number in range(100):
        constants.get(number, CPU, ones)
    assert constants.get("graph", CPU, ones) is of_graph
    assert constants.get("other", CPU, ones) is not other
    assert len(constants._kept) <= 4


def test_unit_scales(state: State) -> None:
    scales = unit_scales(2, 3, CPU)
    assert scales.shape == (2, 3, 1) and scales.dtype == torch.float32 and bool((scales == 1).all())
    assert unit_scales(2, 3, CPU) is scales and unit_scales(3, 2, CPU) is not scales
    state["capturing"] = True
    assert unit_scales(2, 3, CPU) is scales
    # A graph fills those that are not there yet, in memory of its own.
    of_graph = unit_scales(4, 3, CPU)
    assert of_graph.shape == (4, 3, 1) and bool((of_graph == 1).all())
    state["capturing"] = False
    assert unit_scales(4, 3, CPU) is not of_graph


def test_offsets_of_sequences_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    first = device_memory.multiples(4, 7, CPU)
    assert first.tolist() == [0, 7, 14, 21] and first.dtype == torch.int32
    assert device_memory.multiples(4, 7, CPU) is first
    monkeypatch.setattr(device_memory, "is_capturing", lambda device: True)
    assert device_memory.multiples(3, 5, CPU).tolist() == [0, 5, 10]


# work memory


@pytest.fixture
def made(state: State, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in bytes of what is made for a stream."""
    sizes: list[int] = []

    def make(device_index: int, size: int) -> Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    def new(device: str, pieces: Pieces) -> Work:
        assert device.startswith("cuda:")
        tensors = tuple(piece.empty(CPU) for piece in pieces)
        return Work(tensors, tensors)

    monkeypatch.setattr(device_memory, "_bytes_of_current_stream", make)
    monkeypatch.setattr(device_memory, "_new_pieces", new)
    return sizes


PIECES = Piece((3, 5)), Piece((2, 7), torch.float8_e4m3fn)


def addresses(work: Work) -> list[int]:
    return [x.data_ptr() for x in work.tensors]


def test_work_memory_is_cut_into_pieces_that_do_not_overlap(made: list[int]) -> None:
    rows, codes = WorkMemory().get(0, PIECES).tensors
    assert (rows.shape, rows.dtype, codes.shape) == ((3, 5), torch.float32, (2, 7)) and made == [512]
    assert codes.dtype == torch.float8_e4m3fn and rows.is_contiguous() and codes.is_contiguous()
    rows.fill_(1.0)
    codes.view(torch.uint8).fill_(0)
    assert rows.sum() == 15 and codes.data_ptr() - rows.data_ptr() == 256


def test_pieces_in_one_room_do_not_overlap() -> None:
    pieces = *PIECES, Piece((0, 4)), Piece((65, 1), torch.int32), Piece((1,))
    room, begins = device_memory.room_for(pieces), device_memory.first_bytes(pieces)
    assert begins == (0, 256, 512, 512, 1024) and room == Piece((1280,), torch.uint8)
    parts = parts_of(pieces, 9)
    assert [(part.number, part.byte) for part in parts] == [(9, byte) for byte in begins]
    assert [part.facts for part in parts] == [piece.facts for piece in pieces]
    for part, piece, end in zip(parts, pieces, (*begins[1:], room.bytes), strict=True):
        assert part.byte % 256 == 0 and part.byte + piece.bytes <= end


def test_calls_on_a_stream_share_work_memory_and_others_do_not(made: list[int], state: State) -> None:
    memory = WorkMemory()
    first = memory.get(0, PIECES)
    assert memory.get(0, PIECES) is first and addresses(memory.get(0, PIECES[:1])) == addresses(first)[:1]
    state["stream"] = 12
    assert addresses(memory.get(0, PIECES)) != addresses(first)
    state["stream"] = 11
    assert addresses(memory.get(1, PIECES)) != addresses(first) and memory.get(0, PIECES) is first
    others: list[Work] = []
    thread = threading.Thread(target=lambda: others.append(memory.get(0, PIECES)))
    thread.start()
    thread.join()
    assert addresses(others[0]) != addresses(first) and len(made) == 4


def test_work_memory_grows_and_stays_small(made: list[int]) -> None:
    memory = WorkMemory()
    small = memory.get(0, PIECES)
    large = memory.get(0, (Piece((1000,)),))
    assert made == [512, 4096] and memory.get(0, PIECES) is not small
    assert addresses(memory.get(0, PIECES))[0] == addresses(large)[0] and len(made) == 2
    huge = (Piece((device_memory.KEPT_BYTES // 4 + 1,)),)
    assert memory.get(0, huge) is not memory.get(0, huge) and len(made) == 2


def test_what_a_graph_works_in_is_not_kept(made: list[int], state: State) -> None:
    memory = WorkMemory()
    kept = memory.get(0, PIECES)
    state["capturing"] = True
    of_graph = memory.get(0, PIECES)
    assert not set(addresses(of_graph)) & set(addresses(kept)) and made == [512]
    assert memory.get(0, PIECES) is not of_graph
    state["capturing"] = False
    assert memory.get(0, PIECES) is kept


def test_what_is_made_of_work_memory_is_kept_as_long_as_it_is(made: list[int], state: State) -> None:
    memory, owner = WorkMemory(), object()
    others: list[Any] = []

    def note(work: Work) -> list[int]:
        return addresses(work)

    first = memory.made(0, PIECES, owner, note)
    assert first == addresses(memory.get(0, PIECES)) and memory.made(0, PIECES, owner, note) is first
    assert memory.made(0, PIECES, object(), note) is not first
    # Another stream, another thread, another GPU.
    state["stream"] = 12
    assert memory.made(0, PIECES, owner, note) != first
    state["stream"] = 11
    assert memory.made(1, PIECES, owner, note) != first
    thread = threading.Thread(target=lambda: others.append(memory.made(0, PIECES, owner, note)))
    thread.start()
    thread.join()
    assert others[0] != first and memory.made(0, PIECES, owner, note) is first
    # Nothing is kept of a graph's memory, nor of what is large.
    state["capturing"] = True
    assert memory.made(0, PIECES, owner, note) is None
    state["capturing"] = False
    huge = (Piece((device_memory.KEPT_BYTES // 4 + 1,)),)
    assert memory.made(0, huge, object(), note) is None
    # Memory that grows lies elsewhere.
    large = memory.made(0, (Piece((1000,)),), object(), note)
    assert memory.made(0, PIECES, owner, note) is not first
    assert large is not None and (memory.made(0, PIECES, owner, note) or [])[0] == large[0]
    for _ in range(device_memory.KEPT_KINDS + 9):
        memory.made(0, PIECES, object(), note)
    assert len(memory._made) <= device_memory.KEPT_KINDS


def test_few_streams_are_remembered(made: list[int], state: State) -> None:
    memory = WorkMemory()
    for stream in range(100):
        state["stream"] = stream
        memory.get(0, PIECES)
    assert len(memory._of_streams) <= device_memory.KEPT_STREAMS and len(made) == 100


def test_kernels_get_what_is_kept_as_views_that_need_no_conversion(
    made: list[int], state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    memory = WorkMemory()
    for tensor, argument in zip(*memory.get(0, PIECES), strict=True):
        assert isinstance(argument, tvm_ffi.Tensor)
        assert torch.from_dlpack(argument).data_ptr() == tensor.data_ptr()
        assert (argument.shape, str(argument.dtype)) == (
            tensor.shape,
            str(tensor.dtype).removeprefix("torch."),
        )
    # They keep the memory alive, which may be freed with what is kept here.
    rows = memory.get(0, PIECES).tensors[0].fill_(7.0)
    (view, _), _ = memory.get(0, PIECES).arguments, rows
    del memory, rows
    assert (torch.from_dlpack(view) == 7).all()
    state["capturing"] = True
    of_graph = WorkMemory().get(0, PIECES)
    assert of_graph.arguments is of_graph.tensors


def test_a_vector_of_one_number_is_a_row_of_a_table_that_is_kept(state: State) -> None:
    one, other = filled(7, 3, 9, CPU), filled(9, 3, 9, CPU)
    assert one.tolist() == [7, 7, 7] and other.tolist() == [9, 9, 9] and one.dtype == torch.int32
    assert one.is_contiguous() and other.data_ptr() - one.data_ptr() == 2 * 3 * 4
    assert all(filled(7, 3, most, CPU).data_ptr() == one.data_ptr() for most in range(8, 16))
    # Of no table: too large a one, a number behind it, and one that a graph would have to make.
    assert filled(5, 2, device_memory.TABLE_BYTES // 8, CPU).tolist() == [5, 5]
    assert filled(5, 2, 4, CPU).tolist() == filled(5, 2, -1, CPU).tolist() == [5, 5]
    state["capturing"] = True
    assert filled(6, 3, 80, CPU).tolist() == [6, 6, 6]
