"""What the documents show is true: examples run, the diff in the README is the one between the two scripts."""

from __future__ import annotations

import difflib
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ARGOSY, FORKED_PYTHON, TORCHRUN, succeed

import argosy

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
README = (ROOT / "README.md").read_text()
MODULES = sorted(module.name for module in pkgutil.walk_packages(argosy.__path__, "argosy."))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_diff_in_the_readme_is_that_of_the_scripts() -> None:
    before, after = (
        (ROOT / "examples" / name).read_text().splitlines(keepends=True) for name in ("train_before.py", "train.py")
    )
    (shown,) = blocks(README, "diff")
    real = list(difflib.unified_diff(before, after, n=1))[2:]
    assert shown == "".join(real)


def test_both_scripts_of_the_readme_run_and_learn() -> None:
    def first_and_last(text: str) -> tuple[float, float]:
        losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]
        assert len(losses) == 20
        return losses[0], losses[-1]

    before = succeed([*FORKED_PYTHON, ROOT / "examples" / "train_before.py"])
    alone = succeed([sys.executable, ROOT / "examples" / "train.py"])
    together = succeed([*ARGOSY, "run", "-n", "2", "--strategy", "batch=global", ROOT / "examples" / "train.py"])
    for finished in (before, alone, together):
        first, last = first_and_last(finished.out)
        assert last < first / 10
    assert first_and_last(alone.out) == first_and_last(together.out)
    assert len(list(Path("net").glob("step-*/manifest.json"))) == 1


def test_python_in_the_readme_runs(tmp_path: Path) -> None:
    for number, code in enumerate(blocks(README, "python")):
        script = tmp_path / f"readme{number}.py"
        script.write_text(code)
        succeed([sys.executable, script])


# The scripts of the backend's page are for several workers: they have a test of their own.
@pytest.mark.parametrize("document", [p for p in PAGES if p.name != "backend.md"], ids=lambda page: page.name)
def test_python_in_the_documents_runs(document: Path, tmp_path: Path) -> None:
    for number, code in enumerate(blocks(document.read_text(), "python")):
        script = tmp_path / f"{document.stem}{number}.py"
        script.write_text(code)
        succeed([*FORKED_PYTHON, script])


def test_scripts_on_the_page_of_the_backend_run(tmp_path: Path) -> None:
    plain, with_fleet = blocks((ROOT / "docs" / "backend.md").read_text(), "python")
    script = tmp_path / "script.py"
    script.write_text(plain)
    said = succeed([*TORCHRUN, "--nproc-per-node", "2", script], OMP_NUM_THREADS="1").out
    assert "rank 0: [2.0, 2.0, 2.0]" in said
    assert "rank 1: [2.0, 2.0, 2.0]" in said
    script.write_text(with_fleet)
    assert "the last rank is 1" in succeed([*ARGOSY, "run", "-n", "2", script]).out


def test_commands_in_the_documents_are_real() -> None:
    text = "".join("".join(blocks(document.read_text(), "sh")) for document in [ROOT / "README.md", *PAGES])
    commands = re.findall(r"^(?:[A-Z_]+=\S+ )*(argosy \w+|make \w+)", text, flags=re.MULTILINE)
    assert {"make demo", "make test"} <= set(commands)
    for command in set(commands):
        if command.startswith("make"):
            subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)
        else:
            succeed([*ARGOSY, *command.split()[1:], "--help"])


def test_files_named_in_the_documents_exist() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    if name == "argosy.__main__":
        return
    module = importlib.import_module(name)
    if name == "argosy._native":
        return
    assert module.__doc__, f"{name} does not say what it is"
    results = doctest.testmod(module)
    assert results.failed == 0


def test_the_public_api_has_examples_that_run() -> None:
    finder = doctest.DocTestFinder()
    for name in ("init", "Strategy"):
        assert any(test.examples for test in finder.find(getattr(argosy, name), name)), f"{name} has no example"
    for name in ("distribute", "step", "mean", "save", "saved", "load", "export", "print", "report"):
        found = finder.find(getattr(argosy.Fleet, name), name)
        assert any(test.examples for test in found), f"Fleet.{name} has no example"
