"""The house rules of docs/architecture.md that an import can break."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("data", "train", "configs")
# library -> the only modules that may know it
ONLY = {
    "hydra": ("train/cli.py",),
    "zarr": ("data/cache/",),
    "wandb": ("train/loop/tracking.py",),
    "accelerate": ("train/loop/", "train/launch.py", "train/verbs.py", "data/cache/build.py"),
    "transformers": ("data/target.py", "data/tiny.py"),
    "obstore": ("data/cache/remote.py",),
    "openai": ("data/generate/server.py",),
    "omegaconf": ("train/rules.py", "train/cli.py", "train/loop/provenance.py"),
    "pickle": (),
}
PURE = ("train/objective/", "train/models/attention.py", "train/models/rope.py")
IMPURE = ("logging", "accelerate", "torch.distributed", "omegaconf", "hydra", "pathlib", "os")


def modules() -> list[Path]:
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_of(imported: str, library: str) -> bool:
    return imported == library or imported.startswith(library + ".")


def test_there_are_modules_to_check() -> None:
    assert len(modules()) > 40


@pytest.mark.parametrize("path", modules(), ids=name)
def test_module_keeps_to_its_room(path: Path) -> None:
    for imported in imports(path):
        if name(path).startswith("data/"):
            assert not is_of(imported, "train"), "data never imports train"
        for library, rooms in ONLY.items():
            if is_of(imported, library):
                assert name(path).startswith(rooms), f"{library} is known elsewhere only"
        if name(path).startswith(PURE):
            assert not any(is_of(imported, bad) for bad in IMPURE), "pure functions only"


def test_package_inits_hold_a_docstring_only() -> None:
    for path in modules():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, name(path)
            assert isinstance(body[0], ast.Expr), name(path)


def test_help_and_configuration_need_no_torch() -> None:
    """`dspark --help` answers at once because nothing on its way imports torch."""
    seen: set[Path] = set()
    todo = [ROOT / "train" / "cli.py"]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for imported in imports(path, top_level=True):
            assert not is_of(imported, "torch"), f"{name(path)} imports torch"
            assert not is_of(imported, "transformers"), f"{name(path)} imports transformers"
            candidate = ROOT.joinpath(*imported.split(".")).with_suffix(".py")
            if candidate.is_file():
                todo.append(candidate)
    assert ROOT / "train" / "rules.py" in seen


def test_scripts_do_not_shadow_packages() -> None:
    names = {p.stem for p in (ROOT / "scripts").glob("*.py")}
    assert not names & {*PACKAGES, *sys.stdlib_module_names}
