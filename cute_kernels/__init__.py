"""Building blocks in the CuTe Python DSL that do not depend on Hopper."""
