"""The README's examples run as they stand: a reader who copies them gets what they promise.

```python blocks run one after the other in one empty directory, in one namespace each;
```console blocks run there afterwards: each `$ penstock …` line must succeed, and what stands
below it must be what it prints, where `…` stands for anything.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ("README.md", "docs/store.md")


def matches(expected: str, printed: str) -> bool:
    """Whether a line is as shown; `…` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, printed.strip()) is not None


def run_console(block: str, folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *shown = part.rstrip("\n").splitlines()
        if not command.startswith("penstock"):
            continue
        result = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        printed = result.stdout.splitlines()
        for line in shown:
            assert any(matches(line, p) for p in printed), f"{command} does not print {line!r}"


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text())
    for language, block in blocks:
        if language == "python":
            subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=tmp_path, check=True)
        elif language == "console":
            run_console(block, tmp_path)
    languages = {language for language, _ in blocks}
    assert languages >= ({"python", "console"} if page == "README.md" else {"console"})


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_pages_name_no_machine() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        for banned in ("/work/", "/home/", "/root/", "nexus", "artifactory"):
            assert banned not in text, f"{path.name}: {banned}"
