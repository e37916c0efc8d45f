"""Wheel and sdist: the sdist and the wheel hold the whole package, and a wheel alone trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Files beside the package that a build reads.
BESIDE = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")
#: Build of one kind of distribution in the current folder by the back end that pyproject.toml names.
BUILD = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"


def build(kind: str, source: Path, out: Path) -> Path:
    """Distribution of `kind` ("sdist" or "wheel"), built from a folder with the installed setuptools."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD.format(kind, str(out))]
    said = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True).stdout
    return out / said.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from the unpacked sdist of this checkout, which the build does not touch."""
    folder = tmp_path_factory.mktemp("build")
    copy = folder / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for name in BESIDE:
        shutil.copy(ROOT / name, copy)
    sdist = build("sdist", copy, folder / "dist")
    with tarfile.open(sdist) as archive:
        assert f"{sdist.name.removesuffix('.tar.gz')}/constraints.txt" in archive.getnames()
        archive.extractall(folder / "unpacked", filter="data")
    [source] = (folder / "unpacked").iterdir()
    return build("wheel", source, folder / "dist")


@pytest.mark.slow
def test_the_wheel_of_the_sdist_has_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "anabranch"
    files = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("anabranch/")}
    assert held == files


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_wheel_in_an_empty_environment_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """No checkout, no make: what the README tells a newcomer to type."""
    ours = ("PYTHON", "VIRTUAL")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}

    def run(*command: str | Path) -> str:
        result = subprocess.run(
            list(map(str, command)), cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    empty = tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    run(programs / "pip", "install", "--constraint", ROOT / "constraints.txt", wheel)
    where = run(programs / "python", "-c", "import anabranch; print(anabranch.__file__)").strip()
    assert Path(where).is_relative_to(tmp_path / "venv")
    said = run(programs / "anabranch", "train", "--steps", "3", "--no-page")
    assert "0 differ" in said or "zero bits differ" in said, said
    assert (empty / "runs" / "tiny" / "checkpoints" / "step-000003").is_dir()
    run(programs / "anabranch", "verify", "runs/tiny")
    run(programs / "anabranch", "export", "runs/tiny", "--to", "hf", "tiny-hf")
