"""Holds a package to its limits: short modules and floors, few names that change at run time, few lines that type nothing."""

import re
import sys
from pathlib import Path

# Most lines of a module; most lines of the package that set a variable of a module, which are in lower case, or that say Any.
_LINES, _VARIABLES, _UNTYPED = 350, 3, 120
# Most lines of each floor, and of modules that stand alone (""). A ratchet: who needs more raises the number in the same
# commit and gives the reason in the changelog; who removes lines lowers it.
_FLOORS = {
    "": 2239,
    "bridge": 648,
    "commands": 4042,
    "cpu": 646,
    "exchange": 2146,
    "experiments": 4500,
    "integration": 6311,
    "megatron_api": 520,
    "outer": 3446,
}
_VARIABLE, _ANY = re.compile(r"^(?!__)[a-z_]+(: [^=]+)? = "), re.compile(r"\bAny\b")


def main() -> int:
    """Prints what exceeds a limit in the folder of the command line; returns 1 if there is anything."""
    lines = {path: path.read_text().splitlines() for path in sorted(Path(sys.argv[1]).rglob("*.py"))}
    found = [f"{path}: {len(text)} lines, must be at most {_LINES}" for path, text in lines.items() if len(text) > _LINES]
    for pattern, what, most in ((_VARIABLE, "variables of modules", _VARIABLES), (_ANY, "lines with Any", _UNTYPED)):
        places = [
            f"{path}:{number}" for path, text in lines.items() for number, line in enumerate(text, 1) if pattern.search(line)
        ]
        found += [f"{len(places)} {what}, must be at most {most}: {', '.join(places)}"] if len(places) > most else []
    floors: dict[str, int] = {}
    for path, text in lines.items():
        floor = parts[0] if (parts := path.relative_to(sys.argv[1]).parent.parts) else ""
        floors[floor] = floors.get(floor, 0) + len(text)
    for floor, number in floors.items():
        if number > (most := _FLOORS.get(floor, 0)):
            found.append(f"floor {floor or 'of single modules'}: {number:,} lines, must be at most {most:,}")
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
