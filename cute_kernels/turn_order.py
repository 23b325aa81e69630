"""The order in which key tiles add to dQ where its sums are to have the same bits in every run."""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import maximum, minimum


@dataclass(frozen=True)
class TurnOrder:
    """Which query tile a key tile visits when, and how many key tiles add to a query tile before it.

    Key tiles wait for each other's additions, so they had better come to a query tile one after the other. Under a causal
    mask they do if all start at the diagonal: the last one comes first. Without a mask, key tile i of a group starts
    2^``log_shift`` i query tiles further and wraps around, so that the last tile before the query tile comes first there
    too. Groups of ``group`` key tiles follow each other. All tiles of one must be able to run at the same time, and those
    that are claimed first must not wait for others: ``claimed`` turns the order of claims around under a causal mask.
    """

    causal: bool
    num_n_blocks: Any
    group: Any
    log_shift: Any

    @staticmethod
    def largest_group(num_n_blocks: Any, num_m_blocks: Any, num_ctas: Any) -> Any:
        """As many key tiles as run at the same time and can start at different query tiles."""
        return minimum(minimum(num_n_blocks, num_m_blocks), num_ctas)

    @staticmethod
    def largest_shift(num_m_blocks: Any, group: Any) -> Any:
        """The largest ``log_shift`` with which no two of a group start at the same query tile."""
        bits = [minimum((num_m_blocks >> i) // group, 1) for i in range(1, 31)]
        return sum(bits[1:], bits[0])

    def claimed(self, tile: Any) -> Any:
        """The key tile of a head that is claimed as number ``tile``."""
        return self.num_n_blocks - 1 - tile if self.causal else tile

    def first(self, n_block: Any, begin: Any) -> Any:
        """The query tile where a key tile starts that sees those from ``begin`` on."""
        return begin if self.causal else n_block % self.group << self.log_shift

    def turn(self, n_block: Any, m_block: Any, visitors: Any) -> Any:
        """How many key tiles add to the query tile before this one, of the ``visitors`` that do."""
        if self.causal:
            return visitors - 1 - n_block
        place = n_block % self.group
        start = n_block - place
        size = minimum(self.group, self.num_n_blocks - start)
        latest = minimum(m_block >> self.log_shift, size - 1)
        # 1 for those that start behind the query tile and come to it after they have wrapped around.
        wraps = minimum(maximum(place - latest, 0), 1)
        return start + latest - place + wraps * size
