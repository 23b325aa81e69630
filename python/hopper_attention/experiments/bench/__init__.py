"""Speed: throughput of every peer in interleaved rounds, and the latency of small calls."""
