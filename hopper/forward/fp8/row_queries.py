"""Where V comes in rows: whether the FP8 kernel transposes it on its way, or another kernel before."""

from cute_kernels.problem import MAX_HEAD_DIM

FP8_ROW_QUERIES = {64: 320, 128: 448, 256: 320}
"""By head_dim: queries of a key/value head up to which a kernel that transposes V on its way is faster than the one of
``hopper.transpose`` and a kernel that finds it transposed. A query that sees half of the keys counts half
(`fp8_drop_in.json` in the development results)."""

FP8_HALF_ROW_QUERIES = {
    (64, False): 320,
    (64, True): 320,
    (128, False): 1024,
    (128, True): 1024,
    (256, False): 1024,
    (256, True): 768,
}
"""The same for ``FP8_HALF_ROW_TILINGS`` and ``FP8_RETURNED_LSE_ROW_TILINGS``, and by causal
(`fp8_drop_in_rows.json`). Shared memory sets the limit: at head_dim 256 a block of 128 keys takes 2048 cycles of
products and 1792 of shared memory, and 512 to be transposed."""

FP8_LONE_HALF_ROW_QUERIES = {**FP8_HALF_ROW_QUERIES, (256, True): 1280}
"""The same where no heads share K and V, which a kernel ahead reads and writes for each (`fp8_short_ends.json`)."""


LAUNCH_BYTES = 12_000_000
"""What memory gives while a kernel before starts and ends, in bytes of V that are read and written."""

LAUNCH_KEYS = {64: 1280, 128: 2560, 256: 1536}
"""By head_dim: of so many keys a tile takes longer by about a launch if V is transposed on its way
(`fp8_short_drop_in.json`)."""

MANY_VALUES = (1 << 31, 1 << 31)
"""For which a launch counts nothing."""


def transposes_v(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    queries: float,
    half: bool,
    group: int,
    values: tuple[int, int] = MANY_VALUES,
) -> bool:
    """Whether the FP8 kernel should transpose a V in rows; ``queries`` are counted as for FP8_ROW_QUERIES, of ``group``
    heads, and ``half`` says that ``FP8_HALF_ROW_TILINGS`` may serve, or ``FP8_RETURNED_LSE_ROW_TILINGS``. ``values``
    are the elements of V, and the keys that a query sees: to transpose few of them before costs a launch, which is
    worth more queries."""
    size = max(head_dim, head_dim_v)
    native = min((native for native in FP8_ROW_QUERIES if native >= size), default=MAX_HEAD_DIM)
    of_half = FP8_LONE_HALF_ROW_QUERIES if group == 1 else FP8_HALF_ROW_QUERIES
    most = of_half[native, causal] if half else FP8_ROW_QUERIES[native]
    elements, keys = values
    if keys <= LAUNCH_KEYS[native]:
        most += int(most * LAUNCH_BYTES / (2 * max(elements, 1)))
    return queries <= most
