"""The wheel holds every package and its command runs from another folder; README commands work."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment

pytestmark = pytest.mark.slow
TESTED_BLOCK = re.compile(r"<!-- tested -->\n```bash\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, timeout=120)
    return next(folder.glob("*.whl"))


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "data", "train", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = set(zipfile.ZipFile(wheel).namelist())
    assert len(tracked) > 60
    assert set(tracked) <= names
    assert not [n for n in names if n.startswith(("tests/", "scripts/"))]


def test_command_of_the_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=120)
    # The dependencies come from this environment. As a plain path, so that its own editable
    # install of the project stays out.
    site = next((venv / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    variables = {k: v for k, v in environment().items() if k != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        result = subprocess.run(
            command, cwd=elsewhere, env=variables, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert str(venv) in run(python, "-c", "import data; print(data.__file__)")
    command = venv / "bin" / "dspark"
    assert "Distils a draft" in run(command, "train", "--help")
    assert "name: smoke" in run(command, "train", "experiment=smoke", "--cfg", "job")
    # One stage for real, with the prompts that ship inside the wheel.
    run(python, ROOT / "scripts" / "make_tiny_target.py")
    run(command, "regenerate", "experiment=smoke", "regenerate.max_new_tokens=2")
    assert (elsewhere / "outputs" / "smoke" / "rows.jsonl").is_file()


def test_commands_of_the_readme_work(tmp_path: Path) -> None:
    blocks = TESTED_BLOCK.findall((ROOT / "README.md").read_text())
    assert blocks, "README.md has commands marked as tested"
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env=environment(PATH=path, PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert result.returncode == 0, block + result.stdout[-2000:] + result.stderr[-3000:]


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert f"\n{target}:" in makefile
