"""Finds instructions that touch a register of a WGMMA in flight, in a kernel's PTX.

Nothing in the DSL keeps LLVM from moving the arithmetic on an accumulator above the wait for the WGMMA that
writes it; ptxas would then serialize, and no other test would see it.
"""

import re

REGISTER = re.compile(r"%\w+")
DESTINATION = re.compile(r"(?:@!?%\w+\s+)?(?!st\.|bar|mbarrier|cp\.)[\w.:]+\s+\{?(%\w+)")
BRACES = re.compile(r"\{([^}]*)\}")


def find_hazards(ptx: str) -> tuple[int, list[str]]:
    """(how many WGMMAs there are, lines that read or write an accumulator in flight or write an A operand)."""
    groups: list[tuple[set[str], set[str]]] = []
    accumulators: set[str] = set()
    operands: set[str] = set()
    count, hazards = 0, []
    for raw in ptx.splitlines():
        line = raw.strip()
        if line.startswith("wgmma.mma_async"):
            lists = [set(REGISTER.findall(part)) for part in BRACES.findall(line)]
            accumulators |= lists[0]
            operands |= lists[1] if len(lists) > 1 else set()
            count += 1
        elif line.startswith("wgmma.commit_group"):
            groups.append((accumulators, operands))
            accumulators, operands = set(), set()
        elif line.startswith("wgmma.wait_group"):
            pending = int(line.rstrip(";").split()[-1])
            groups = groups[len(groups) - pending :] if pending else []
        elif not line.startswith("wgmma"):
            in_flight = accumulators.union(*(group[0] for group in groups))
            read_in_flight = operands.union(*(group[1] for group in groups))
            written = DESTINATION.match(line)
            if in_flight & set(REGISTER.findall(line)) or (written and written[1] in read_in_flight):
                hazards.append(line)
    return count, hazards
