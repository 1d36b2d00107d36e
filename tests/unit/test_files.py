"""Files that appear complete or not at all, and folders with one writer."""

import subprocess
import sys
from pathlib import Path

import pytest

from data.errors import UserError
from data.files import atomic_folder, sole_writer, write_atomic
from tests.support.processes import ROOT


def fail_half_way(final: Path) -> None:
    with atomic_folder(final) as partial:
        (partial / "a").write_text("2")
        raise RuntimeError


def test_older_folder_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "export"
    with atomic_folder(final) as partial:
        (partial / "a").write_text("1")
    with pytest.raises(RuntimeError):
        fail_half_way(final)
    assert (final / "a").read_text() == "1"
    with atomic_folder(final) as partial:
        (partial / "b").write_text("3")
        assert (final / "a").read_text() == "1"
    assert [p.name for p in final.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_write_atomic_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "long text")
    write_atomic(path, b"x")
    assert path.read_bytes() == b"x"
    assert list(tmp_path.iterdir()) == [path]


def test_second_writer_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from data.files import sole_writer\n"
        "with sole_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match="another process is writing here"),
            sole_writer(tmp_path),
        ):
            pass
        other.kill()
    with sole_writer(tmp_path):
        pass
