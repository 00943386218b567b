"""``lazysnap export --force`` replaces an empty directory or an earlier export, and nothing else."""

import errno
import os
from pathlib import Path

import pytest
from cli_level import SHARD, at, files, put, run, run_json

pytestmark = pytest.mark.slow

FORMATS = ["out.safetensors", "out.ckpt", "out"]


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def level(make_url):
    url = make_url("local")
    put(url, 10)
    return Path(url)


def refused(capsys, level: Path, to: Path | str, because: str) -> None:
    code, result = run_json(capsys, "export", level, "latest", "--to", to, "--force", "--format", "dcp")
    assert code == 2
    assert because in result["error"]
    assert "choose another name" in result["error"]


@pytest.mark.parametrize("which", ["level", "its parent", "other level", "snapshot", "foreign"])
def test_a_directory_that_no_export_wrote_stays_as_it_is(level, make_url, tmp_path, capsys, which):
    other = Path(make_url("local"))
    put(str(other), 20)
    foreign = tmp_path / "foreign"
    (foreign / "sub").mkdir(parents=True)
    (foreign / "sub" / "thesis.tex").write_text("years of work")
    to = {
        "level": level,
        "its parent": tmp_path,
        "other level": other,
        "snapshot": level / at(10),
        "foreign": foreign,
    }[which]
    before = content(tmp_path)
    refused(capsys, level, to, str(to))
    assert content(tmp_path) == before


def test_one_foreign_file_protects_an_earlier_export(level, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("export", level, "latest", "--to", out) == 0
    (out / "notes.txt").write_text("mine")
    before = content(tmp_path)
    refused(capsys, level, out, "'notes.txt'")
    assert content(tmp_path) == before
    (out / "notes.txt").unlink()
    (out / "__1_0.distcp").mkdir()  # the name of an export's file
    refused(capsys, level, out, "'__1_0.distcp'")
    (out / "__1_0.distcp").rmdir()
    put(str(level), 20)
    assert run("export", level, "20", "--to", out, "--force") == 0
    assert content(tmp_path) != before


def test_a_checkpoint_that_torch_itself_saved_there_stays(level, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("export", level, "latest", "--to", out) == 0
    (mark,) = (path for path in out.iterdir() if path.suffix == ".json")
    mark.unlink()  # what torch.distributed.checkpoint.save writes has the same names, and not this one
    before = content(tmp_path)
    refused(capsys, level, out, "no export wrote")
    mark.write_text('{"mine": 1}')
    refused(capsys, level, out, "no export wrote")
    mark.unlink()
    assert content(tmp_path) == before


@pytest.mark.parametrize("where", [".", "..", "../.."])
def test_the_current_directory_and_those_above_it_are_never_replaced(level, tmp_path, capsys, monkeypatch, where):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    inode = inner.stat().st_ino
    refused(capsys, level, where, "current directory" if where == "." else str(inner.joinpath(where).resolve()))
    assert inner.stat().st_ino == inode
    assert list(inner.iterdir()) == []


def test_nothing_is_replaced_through_a_symbolic_link(level, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.mkdir()
    link = tmp_path / "link"
    link.symlink_to(victim, target_is_directory=True)
    refused(capsys, level, link, "symbolic link")
    assert link.is_symlink()
    assert list(victim.iterdir()) == []
    file = tmp_path / "w.ckpt"
    file.symlink_to(tmp_path / "model.ckpt")
    assert run("export", level, "latest", "--to", file, "--force") == 2
    assert file.is_symlink()


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_directory_and_an_earlier_export_of_any_format_are_replaced(level, tmp_path, name):
    to = tmp_path / name
    to.mkdir()
    for kind in ("dcp", "ckpt", "safetensors", "dcp"):
        assert run("export", level, "latest", "--to", to, "--force", "--format", kind) == 0
        assert to.is_dir() == (kind == "dcp")
    assert {path.name for path in tmp_path.iterdir()} == {name, level.name}


@pytest.mark.parametrize("text", ["import torch\n", "PK\x03\x04 a zip file of others", "\x02\0\0\0\0\0\0\0[]"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_kind_is_not_replaced(level, tmp_path, capsys, name, text):
    to = tmp_path / name
    to.write_text(text)
    code, result = run_json(capsys, "export", level, "latest", "--to", to, "--force")
    assert code == 2
    assert "no export wrote" in result["error"]
    assert to.read_text() == text


@pytest.mark.parametrize("force", [[], ["--force"]], ids=str)
def test_nothing_is_exported_into_a_snapshot(level, capsys, force):
    before = files(str(level))
    for name in (SHARD, "model.safetensors"):
        to = level / at(10) / name
        assert run("export", level, "latest", "--to", to, *force) == 2
    assert files(str(level)) == before


def test_what_comes_into_an_export_while_it_is_replaced_is_not_deleted(level, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run("export", level, "latest", "--to", out) == 0
    rename = os.rename

    def rename_and_add(source: str, target: str) -> None:
        rename(source, target)
        if str(source) == str(out):
            Path(target, "thesis.tex").write_text("years of work")

    monkeypatch.setattr(os, "rename", rename_and_add)
    code, result = run_json(capsys, "export", level, "latest", "--to", out, "--force")
    assert code == 0
    kept = [path for path in tmp_path.rglob("thesis.tex")]
    assert [path.read_text() for path in kept] == ["years of work"]
    [note] = [note for note in result["notes"] if str(kept[0].parent) in note]
    assert "is replaced; what could not be deleted of the earlier export is in" in note
    assert (out / ".metadata").is_file()


def test_an_earlier_export_stays_if_the_new_name_cannot_be_made_durable(level, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run("export", level, "latest", "--to", out) == 0
    put(str(level), 20)
    before = content(tmp_path)
    sync = os.fsync

    def sync_files_alone(handle: int) -> None:
        if os.path.samestat(os.fstat(handle), tmp_path.stat()):
            raise OSError(errno.EIO, "injected")
        sync(handle)

    monkeypatch.setattr(os, "fsync", sync_files_alone)
    code, result = run_json(capsys, "export", level, "latest", "--to", out, "--force")
    assert (code, "injected" in result["error"]) == (2, True)
    assert content(tmp_path) == before
