"""The folder works wherever it lies, without the packages that use it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PROGRAM = """
import ptxsim, torch
text = '''
.version 7.8
.target sm_80
.address_size 64
.visible .entry fill(.param .u64 out)
{
.reg .b32 %r<3>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
st.global.u32 [%rd3], %r1;
ret;
}
'''
out = torch.full((64,), -1, dtype=torch.int32)
ptxsim.launch(ptxsim.from_ptx(text, target=80), (1,), out, block=64, undefined=[out])
assert out.equal(torch.arange(64, dtype=torch.int32))
"""


def test_the_folder_alone_runs_a_kernel(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "ptxsim", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_in_it_imports_what_uses_it():
    for path in FOLDER.rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M)
        assert not {"attnkern", "gate", "launches", "routes", "bench", "setup"} & set(imported), path
