"""Prints the JSON Schema of a command: `python -m penstock.cli.schemas topic list`."""

import json
import sys

from penstock.cli.schemas.registry import OUTPUTS, schema_of


def main(words: list[str]) -> int:
    """Print the schema of the command, or the list of commands."""
    command = " ".join(words)
    if command not in OUTPUTS:
        print("\n".join(sorted(OUTPUTS)), file=sys.stderr if words else sys.stdout)
        return 2 if words else 0
    print(json.dumps(schema_of(command), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
