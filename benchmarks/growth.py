"""What grows with the size of a broker: CPU per message, start-up, waiting times.

python -m benchmarks.growth [DIMENSION …]
"""

import sys

from benchmarks import growth_cores, growth_cpu, growth_waits

DIMENSIONS = {**growth_cpu.DIMENSIONS, **growth_waits.DIMENSIONS, **growth_cores.DIMENSIONS}


def main(names: list[str] | None = None) -> None:
    for name in names or DIMENSIONS:
        DIMENSIONS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
