"""Backward throughput of every installed peer: the gradients alone, without the forward.

    python benchmarks/backward.py                                   the paper's 36 cells
    python benchmarks/backward.py --only s16384 --peers ours,fa4
    python benchmarks/backward.py --compare before.json after.json  two reports side by side; runs nothing

What is timed is torch.autograd.grad of an output that was computed before; dq, dk and dv are checked against float64
first. Rows: python/hopper_attention/experiments/bench_backward_peers.py. The rest is as in benchmarks/forward.py.
"""

from __future__ import annotations

import sys

from benchmarks.forward import main
from hopper_attention.experiments.bench.suites import BACKWARD

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], BACKWARD, __doc__))
