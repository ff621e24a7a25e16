"""`make wheel-test`: the wheels in empty environments in which no compiler is found, each Python with each torch.

In each, `python -m attnkern check` has every family of kernels that the machine runs held to float64, and a layer makes
a training step. An environment is deleted before the next is made: torch's CUDA builds have gigabytes.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAINING_STEP = """
import warnings
import torch
import attnkern

warnings.simplefilter("error", attnkern.FallbackWarning)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layer = attnkern.nn.MultiheadAttention(64, 4, batch_first=True, device=device)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
x, wanted = torch.randn(2, 2, 50, 64, device=device)

def loss():
    return (layer(x, x, x, need_weights=False)[0] - wanted).square().mean()

before = loss()
before.backward()
optimizer.step()
assert loss() < before
print("torch", torch.__version__)
"""
NEWEST = "newest"


def found_pythons() -> list[str]:
    """The oldest CPython from 3.10 on that is here, and the newest."""
    names = [f"python3.{minor}" for minor in range(10, 30)]
    found = [x for x in names if shutil.which(x) and not subprocess.run([x, "-c", ""], capture_output=True).returncode]
    return list(dict.fromkeys([found[0], found[-1]])) if found else []


def isolated(environment: Path) -> dict[str, str]:
    """Variables for a program in an environment: PATH is that environment alone."""
    return {"PATH": str(environment / "bin"), "HOME": str(environment)}


def run(*command: str | Path, env: dict[str, str]) -> str:
    """What a command prints; RuntimeError with that if it fails."""
    done = subprocess.run(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=env["HOME"]
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def try_out(environment: Path) -> str:
    """Has the attnkern of an environment checked, and a step made. Returns the version of its torch."""
    python, env = environment / "bin" / "python", isolated(environment)
    run(python, "-m", "attnkern", "check", env=env)
    return run(python, "-c", TRAINING_STEP, env=env).split()[-1]


def install(environment: Path, *what: str) -> None:
    """By pip with the user's settings, of wheels alone."""
    ours = ("PYTHONPATH", "CC", "CXX")
    env = {**{k: v for k, v in os.environ.items() if k not in ours}, **isolated(environment)}
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
    run(environment / "bin" / "python", *pip, *what, env=env)


def wheels_for_here(wheels: list[Path]) -> list[Path]:
    here = [wheel for wheel in wheels if wheel.stem.endswith(f"_{platform.machine()}")]
    for wheel in sorted({*wheels} - {*here}):
        print(f"not tried: {wheel.name} is for another machine", flush=True)
    return here


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/wheels.py", description="Installs wheels, and tries them out.")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--pythons", nargs="+", default=found_pythons(), help="default: the oldest here and the newest")
    parser.add_argument("--torches", nargs="+", default=[NEWEST], help='versions; "newest": what pip takes')
    parser.add_argument("--folder", type=Path, help="where environments are made")
    given = parser.parse_args(arguments)
    if missing := [str(wheel) for wheel in given.wheels if not wheel.exists()]:
        parser.error(f"no wheel {missing[0]}: make wheel")
    wheels = [wheel.resolve() for wheel in wheels_for_here(given.wheels)]
    if not wheels:
        return 1
    failed = 0
    for python in given.pythons:
        for torch in given.torches:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                environment = Path(folder).resolve()
                subprocess.run([python, "-m", "venv", environment], check=True)
                version = re.sub(
                    r"^Python ", "", run(environment / "bin/python", "-V", env=isolated(environment)).strip()
                )
                for number, wheel in enumerate(wheels):
                    begin = time.perf_counter()
                    wanted = "torch" if torch == NEWEST else f"torch=={torch}"
                    told = f"Python {version}, {wanted}, {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)"
                    try:
                        install(
                            environment, *([wanted] if number == 0 else ["--no-deps", "--force-reinstall"]), str(wheel)
                        )
                        installed = time.perf_counter() - begin
                        has = try_out(environment)
                        tried = time.perf_counter() - begin - installed
                        print(
                            f"right: {told}: torch {has}; installed in {installed:.0f} s, tried in {tried:.0f} s",
                            flush=True,
                        )
                    except RuntimeError as error:
                        failed += 1
                        print(f"WRONG: {told}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
