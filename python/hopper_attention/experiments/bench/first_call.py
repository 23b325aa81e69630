"""Seconds of the first call in this process beyond importing torch, printed as one line of JSON.

``bench.latency`` runs this text in fresh processes; nothing imports it. CUDA and a torch operator are brought up first,
so that what is timed is this package alone: its import, finding or building the kernel, and the call.
"""

from __future__ import annotations

import json
import sys
import time

import torch


def main(device: str) -> None:
    q, k, v = (torch.randn(1, 128, 2, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    (q + k + v).sum().item()  # kernels of torch's own, and a wait for them
    start = time.perf_counter()
    import hopper_attention

    imported = time.perf_counter()
    out = hopper_attention.flash_attn_func(q, k, v)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    called = time.perf_counter()
    again = hopper_attention.flash_attn_func(q, k, v)
    ok = torch.equal(out, again) and bool(out.isfinite().all())
    seconds = {"import": imported - start, "call": called - imported, "total": called - start}
    print(json.dumps({**seconds, "ok": ok}))


if __name__ == "__main__":
    main(sys.argv[1])
