"""``python -m attnkern``: what is installed here, and which backends can run.

``python -m attnkern check``: whether they compute the right numbers (check.py).
"""

import argparse
import sys
from collections.abc import Sequence

import attnkern

from .backends import triton_interpreted


def show() -> None:
    for name, value in attnkern.build_info().items():
        text = " ".join(value) if isinstance(value, list) else value
        print(f"{name:<16} {text or '-'}")
    print(f"\n{'backend':<16} {'devices':<16} state")
    for backend in attnkern.backends():
        state = "available" if backend.available else backend.why_not
        if backend.name == "triton" and backend.available and triton_interpreted.asked:
            state = triton_interpreted.NOTE
        print(f"{backend.name:<16} {', '.join(backend.device_types):<16} {state}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, more than 0, got {text}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m attnkern",
        usage="%(prog)s [-h] [check [--seconds S]]",
        description="Without a command: what is installed, and which backends can run.",
    )
    commands = parser.add_subparsers(dest="command", metavar="check", prog="python -m attnkern")
    check = commands.add_parser(
        "check",
        help="run every kernel family of this machine against float64; exit status 1 if one is wrong",
        description="Runs a few calls of every kernel family that this machine has, forward and backward, against "
        "float64, each family in a process of its own. Exit status: 0 all right, 1 something isn't.",
    )
    check.add_argument("--seconds", type=_seconds, metavar="S", help="how long a call may take (default: 120)")
    check.add_argument("--one", metavar="FAMILY", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.command is None:
        show()
        return 0
    from . import check as checks

    if given.one is not None:
        checks.run_one(given.one)
        return 0
    return checks.main(seconds=checks.SECONDS if given.seconds is None else given.seconds)


if __name__ == "__main__":
    sys.exit(main())
