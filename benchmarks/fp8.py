"""FP8 forward throughput, kernel alone and end to end, of every installed peer that has one.

    python benchmarks/fp8.py                                   the paper's 36 cells
    python benchmarks/fp8.py --only s16384-h16-d128 --peers cudnn,cudnn_bshd,cudnn_lean
    python benchmarks/fp8.py --compare before.json after.json  two reports side by side; runs nothing

Shapes name the dtype of the inputs and of the output, as bf16. Rows, and what each makes e4m3 of:
python/hopper_attention/experiments/bench_fp8_peers.py. The rest is as in benchmarks/forward.py.
"""

from __future__ import annotations

import sys

from benchmarks.forward import main
from hopper_attention.experiments.bench.suites import FP8

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FP8, __doc__))
