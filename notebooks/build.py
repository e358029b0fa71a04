"""Turn the notebooks' sources (py:percent, *.py) into *.ipynb, and check that the two agree.

    python notebooks/build.py                # every .ipynb from its .py; outputs of unchanged
                                             # cells are kept
    python notebooks/build.py --check        # exit 1 if a .ipynb is not exactly its source (CI)
    python notebooks/build.py --execute 01   # run the notebooks whose name starts so, and store
                                             # their outputs

The .py files are what we edit and review (they diff well and run as scripts); the .ipynb files are
what you open.
"""
from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat

HERE = Path(__file__).resolve().parent


def cells_of(source: str) -> list[nbformat.NotebookNode]:
    """The cells of a py:percent text; markdown cells are comments without their "# "."""
    cells = []
    for k, part in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().split("\n")]
            cell = nbformat.v4.new_markdown_cell("\n".join(lines))
        else:
            cell = nbformat.v4.new_code_cell(body.strip())
        cell["id"] = f"cell-{k:03d}"
        cells.append(cell)
    return cells


def build(source: Path) -> nbformat.NotebookNode:
    """The notebook of a source file, with the outputs its .ipynb already has for unchanged code
    cells."""
    notebook = nbformat.v4.new_notebook(cells=cells_of(source.read_text(encoding="utf-8")))
    notebook.metadata["kernelspec"] = dict(name="python3", display_name="Python 3",
                                           language="python")
    target = source.with_suffix(".ipynb")
    if target.exists():
        old = {c["source"]: c
               for c in nbformat.read(target, 4)["cells"] if c["cell_type"] == "code"}
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code" and cell["source"] in old:
                before = old[cell["source"]]
                cell["outputs"], cell["execution_count"] = (before["outputs"],
                                                            before["execution_count"])
    return notebook


def differs(source: Path) -> bool:
    """Whether the .ipynb is missing or holds other cells than its source."""
    target = source.with_suffix(".ipynb")
    if not target.exists():
        return True
    key = lambda notebook: [(c["cell_type"], c["source"]) for c in notebook["cells"]]
    return key(nbformat.read(target, 4)) != key(build(source))


def execute(notebook: nbformat.NotebookNode, timeout: int | None = None) -> nbformat.NotebookNode:
    """Run every cell in a fresh kernel in this folder. Raises the first cell's error."""
    from nbclient import NotebookClient
    return NotebookClient(notebook, timeout=timeout, kernel_name="python3",
                          resources={"metadata": {"path": str(HERE)}}).execute()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare, change nothing")
    parser.add_argument("--execute", nargs="*", default=[], metavar="PREFIX",
                        help="run these notebooks and store their outputs")
    args = parser.parse_args()
    sources = sorted(p for p in HERE.glob("[0-9a]*.py"))
    if args.check:
        stale = [p.name for p in sources if differs(p)]
        print(f"stale: {', '.join(stale)}; run python notebooks/build.py" if stale
              else f"{len(sources)} notebooks agree with their sources")
        return 1 if stale else 0
    for source in sources:
        notebook = build(source)
        if any(source.name.startswith(prefix) for prefix in args.execute):
            notebook = execute(notebook)
            for cell in notebook["cells"]:
                # time stamps: noise in a diff
                cell["metadata"].pop("execution", None)
        # the kernel's; else each build would change the file
        notebook.metadata.pop("language_info", None)
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        print(f"wrote {source.with_suffix('.ipynb').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
