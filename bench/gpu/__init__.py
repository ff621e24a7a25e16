"""The GPU campaign, ``python -m bench.gpu`` (`make gpu`): what is to be measured and checked on a GPU, in stages."""

import sys
from pathlib import Path

TESTS_FOLDER = str(Path(__file__).resolve().parents[2] / "tests")  # where gpu_kernels is, and the simulator
if TESTS_FOLDER not in sys.path:
    sys.path.append(TESTS_FOLDER)
