"""Makes docs/examples/heads.ipynb of heads.py, run, with what it prints and draws: python docs/make_notebook.py"""

import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "examples" / "heads.py"


def cells_of(script):
    """(title, code) of each `# %%` cell; the docstring is the first one's title."""
    docstring, *parts = re.split(r"^# %% ?", script, flags=re.MULTILINE)
    yield docstring.strip().strip('"').split("\n")[0], ""
    for part in parts:
        title, _, code = part.partition("\n")
        yield title, code.strip("\n")


def notebook(script, run):
    """nbformat 4. `run` executes a cell's code and gives its outputs."""
    cells = []
    for n, (title, code) in enumerate(cells_of(script)):
        text = title if n else f"# {title}"
        cells.append({"cell_type": "markdown", "id": f"text-{n}", "metadata": {}, "source": text})
        if code:
            outputs, count = run(code), {"execution_count": n}
            cells.append(
                {"cell_type": "code", "id": f"code-{n}", "metadata": {}, "source": code, "outputs": outputs, **count}
            )
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sys.argv = ["heads.py", "as in a notebook"]
    variables = {"__name__": "__main__"}

    def run(code):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, variables)
        outputs = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).savefig(picture, dpi=100, format="png")
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        plt.close("all")
        return outputs

    made = notebook(SCRIPT.read_text(), run)
    SCRIPT.with_suffix(".ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
